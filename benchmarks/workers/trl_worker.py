"""TRL's GRPOTrainer: `train()` in a thread, which waits for a request before each of its steps."""

import queue
import threading
import time

import numpy as np
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.reward import vowel_share
from benchmarks.workers import torch_grpo as grpo
from benchmarks.workers.protocol import Inputs, System, serve
from benchmarks.workers.torch_llama import language_model

STEPS = 10_000  # more than anyone asks for


class OneStepAtATime(TrainerCallback):
    """Holds the training thread between steps."""

    def __init__(self):
        """No request yet."""
        self.asked, self.done = queue.Queue(), queue.Queue()

    def on_step_begin(self, args, state, control, **kwargs):
        """Waits."""
        self.asked.get()

    def on_step_end(self, args, state, control, **kwargs):
        """Says that the optimizer has stepped."""
        grpo.synchronize()
        self.done.put(None)


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that keeps the seconds of generating and grading, and the samples."""

    def _timed(self, name: str, call, *arguments):
        started = time.perf_counter()
        result = call(*arguments)
        grpo.synchronize()
        self.inside[name] = time.perf_counter() - started
        return result

    def _generate_single_turn(self, prompt_ids, *others):
        self.prompt_ids = prompt_ids
        result = self._timed("generate", super()._generate_single_turn, prompt_ids, *others)
        self.drawn = sum(map(len, result[0]))
        return result

    def _calculate_rewards(self, *arguments):
        return self._timed("grade", super()._calculate_rewards, *arguments)


def prepare(inputs: Inputs) -> System:
    """The trainer, started and waiting."""
    shape = inputs.shape
    model = language_model(inputs.folder / "model", grpo.DEVICE)
    callback = OneStepAtATime()
    settings = {
        "bf16": inputs.precision == "bfloat16",
        "use_cpu": grpo.DEVICE.type == "cpu",
        "per_device_train_batch_size": shape["rows"] // shape["micro_batches"],
        "gradient_accumulation_steps": shape["micro_batches"],
        "num_generations": shape["group_size"],
        "max_completion_length": shape["completion_tokens"],
        "temperature": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "loss_type": "dapo",  # the mean over the batch's tokens
        "epsilon": grpo.CLIP_RANGE,
        "optim": "adamw_torch_fused",
        "learning_rate": grpo.LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": grpo.CLIP_NORM,
        "gradient_checkpointing": bool(shape["gpu"]),
    }
    trainer = TimedTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(inputs.folder / "model"),
        reward_funcs=lambda prompts, completions, **_: vowel_share(prompts, completions, completions),
        train_dataset=Dataset.from_dict({"prompt": inputs.texts}),
        callbacks=[callback],
        args=GRPOConfig(
            output_dir=str(inputs.scratch),
            max_steps=STEPS,
            shuffle_dataset=False,
            report_to=[],
            logging_steps=STEPS,
            save_strategy="no",
            disable_tqdm=True,
            **settings,
        ),
    )
    trainer.inside = {}

    def train() -> None:
        try:
            trainer.train()
        except Exception as error:
            callback.done.put(error)

    threading.Thread(target=train, daemon=True).start()

    def step(number: int) -> dict:
        callback.asked.put(None)
        if error := callback.done.get():
            raise error
        given = np.array(trainer.prompt_ids)[:: shape["group_size"]]
        np.testing.assert_array_equal(given, inputs.prompts)
        return {"inside": dict(trainer.inside), "tokens": trainer.drawn, "rest": "update"}

    def write_checkpoint(number: int) -> dict:
        trainer._save_checkpoint(trainer.model, None)
        return {}

    return System(
        phases={"step": step, "checkpoint": write_checkpoint},
        checks={},
        peak_device_bytes=grpo.peak_device_bytes,
        packages=("trl", "transformers", "torch"),
        notes={"settings": settings},
    )


if __name__ == "__main__":
    serve(prepare)
