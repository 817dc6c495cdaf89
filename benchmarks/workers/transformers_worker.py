"""transformers' own model and `generate`, and a GRPO step in plain torch."""

import torch
from transformers import AutoTokenizer

from benchmarks.workers import torch_grpo as grpo
from benchmarks.workers.protocol import Inputs, Stopwatch, System, serve
from benchmarks.workers.torch_llama import language_model


def prepare(inputs: Inputs) -> System:
    """The model, and its timed phases.

    bfloat16 is autocast in the update, as usual; `generate` runs under it too.
    """
    shape, limit = inputs.shape, inputs.shape["completion_tokens"]
    model = language_model(inputs.folder / "model", grpo.DEVICE)
    tokenizer = AutoTokenizer.from_pretrained(inputs.folder / "model")
    parameters = list(model.parameters())
    optimizer = grpo.optimizer_of(parameters)
    prompts = grpo.prompt_tokens(inputs)
    stops = torch.tensor(shape["stop_ids"], device=grpo.DEVICE)
    half = torch.autocast(grpo.DEVICE.type, torch.bfloat16, enabled=inputs.precision == "bfloat16")

    def logprobs_of(some: torch.Tensor, completions: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([some.repeat_interleave(len(completions) // len(some), 0), completions], 1)
        with half:
            hidden = model.model(input_ids=rows[:, :-1]).last_hidden_state[:, -completions.shape[1] :]
            return grpo.token_logprobs(model.lm_head, hidden, completions, shape["vocabulary"])

    @torch.no_grad()
    def drawn(max_tokens: int = limit, group: int = shape["group_size"], greedy: bool = False):
        rows = prompts.repeat_interleave(group, 0)
        choice = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        with half:
            tokens = model.generate(rows, attention_mask=torch.ones_like(rows), max_new_tokens=max_tokens, **choice)
        tokens = tokens[:, rows.shape[1] :]
        ended = torch.isin(tokens, stops)
        mask = ended.cumsum(1) - ended.int() == 0
        grpo.synchronize()
        return tokens, mask

    def step(number: int) -> dict:
        watch = Stopwatch()
        tokens, mask = drawn()
        watch.part("generate")
        rewards = grpo.graded(inputs, tokenizer, tokens, mask)
        watch.part("grade")
        grpo.accumulate(logprobs_of, inputs, prompts, tokens, mask, None, rewards)
        grpo.apply(optimizer, parameters)
        grpo.synchronize()
        watch.part("update")
        return {"inside": watch.seconds, "tokens": int(mask.sum())}

    def prefill(number: int) -> dict:
        drawn(1)
        return {}

    def rescore(number: int) -> dict:
        grpo.compared_logprobs(inputs, logprobs_of)
        return {}

    def greedy() -> list:
        tokens, mask = drawn(group=1, greedy=True)
        return torch.nn.functional.pad(tokens * mask, (0, limit - tokens.shape[1])).tolist()

    return System(
        phases={
            "step": step,
            "prefill": prefill,
            "rescore": rescore,
            "checkpoint": lambda number: grpo.write_checkpoint(inputs, model.state_dict(), optimizer),
        },
        checks={
            "greedy": greedy,
            "logprobs": lambda file: grpo.save_logprobs(inputs, logprobs_of, file),
            "loss": lambda file: grpo.compared_loss(inputs, parameters, logprobs_of, file),
        },
        peak_device_bytes=grpo.peak_device_bytes,
        packages=("torch", "transformers"),
        notes={"behavior log-probs": "none: those of the update, without gradient"},
    )


if __name__ == "__main__":
    serve(prepare)
