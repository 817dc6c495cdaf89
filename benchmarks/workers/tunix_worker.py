"""Tunix's GRPO learner with its own sampler: `train` in a thread, which waits for its next batch of prompts."""

import dataclasses
import functools
import json
import queue
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from transformers import AutoTokenizer
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as llama_params
from tunix.rl import common, rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

from benchmarks.reward import vowel_share
from benchmarks.workers.protocol import Inputs, System, serve

STEPS = 10_000  # more than anyone asks for


def load(inputs: Inputs, mesh: jax.sharding.Mesh) -> nnx.Module:
    """The model of the folder, weights in the precision."""
    folder = inputs.folder / "model"
    config = json.loads((folder / "config.json").read_text())
    sizes = llama.ModelConfig(
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
        weight_tying=config["tie_word_embeddings"],
    )
    # Tunix 0.1.7 takes the rotary base into its config and then always uses one million.
    llama.apply_rope = functools.partial(llama.apply_rope, rope_theta=config["rope_theta"])
    with mesh:
        return llama_params.create_model_from_safe_tensors(str(folder), sizes, mesh, dtype=jnp.dtype(inputs.precision))


def prepare(inputs: Inputs) -> System:
    """The learner, started and waiting."""
    shape, texts, inside = inputs.shape, inputs.texts, {}
    asked, done = queue.Queue(), queue.Queue()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    limit = shape["completion_tokens"]
    rollout = RolloutConfig(
        max_tokens_to_generate=limit,
        max_prompt_length=shape["prompt_tokens"],
        kv_cache_size=shape["prompt_tokens"] + limit,
        temperature=1.0,
        top_p=1.0,
        eos_tokens=shape["stop_ids"],
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6, weight_decay=0.0))
    cluster = rl_cluster.RLCluster(
        actor=load(inputs, mesh),
        tokenizer=AutoTokenizer.from_pretrained(inputs.folder / "model"),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(rl_cluster.Role, mesh),
            rollout_config=rollout,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optimizer,
                eval_every_n_steps=STEPS,
                max_steps=STEPS,
                mini_batch_size=shape["prompts"],
                train_micro_batch_size=shape["prompts"] // shape["micro_batches"],
                rollout_micro_batch_size=shape["prompts"],
                compute_logps_micro_batch_size=shape["prompts"] // shape["micro_batches"],
            ),
        ),
    )

    def timed(name: str, call):
        @functools.wraps(call)
        def measured(*arguments, **named):
            started = time.perf_counter()
            result = call(*arguments, **named)
            inside[name] = time.perf_counter() - started
            if name == "generate":
                inside["output"] = result
            return result

        return measured

    cluster.generate = timed("generate", cluster.generate)
    learner = GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(num_generations=shape["group_size"], beta=0.0, epsilon=0.2, loss_agg_mode="token-mean"),
        reward_fns=timed("grade", lambda prompts, completions, **_: vowel_share(prompts, completions, completions)),
    )

    def batches():
        while True:
            # The learner requests a batch when the step before is over, except for work still on the device.
            jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
            done.put(None)
            asked.get()
            part = shape["prompts"] // shape["micro_batches"]
            for start in range(0, shape["prompts"], part):
                yield {"prompts": np.array(texts[start : start + part], dtype=object)}

    def train() -> None:
        try:
            with mesh:
                learner.train(batches())
        except BaseException as error:
            done.put(error)

    threading.Thread(target=train, daemon=True).start()

    def waited() -> None:
        if error := done.get():
            raise error

    waited()

    def step(number: int) -> dict:
        asked.put(None)
        waited()
        output = inside.pop("output")
        given = output.left_padded_prompt_tokens[:: shape["group_size"]]
        np.testing.assert_array_equal(given, inputs.prompts)
        return {"inside": dict(inside), "tokens": sum(map(len, output.tokens)), "rest": "update"}

    def prefill(number: int) -> dict:
        rows = [text for text in texts for _ in range(shape["group_size"])]
        with mesh:
            cluster.rollout.generate(rows, dataclasses.replace(rollout, max_tokens_to_generate=1))
        return {}

    # --- Results that are compared with other systems.
    def greedy() -> list:
        options = {"max_generation_steps": limit, "max_prompt_length": shape["prompt_tokens"]}
        with mesh:
            output = cluster.rollout._sampler(texts, **options, eos_tokens=shape["stop_ids"])
        return [[*map(int, row)] + [0] * (limit - len(row)) for row in output.tokens]

    def save_logprobs(file: str) -> None:
        graph, state = nnx.split(cluster.actor_trainer.model)
        prompts = np.repeat(inputs.prompts, shape["group_size"], 0)
        pad, end = cluster.rollout.pad_id(), cluster.rollout.eos_id()
        with mesh:
            found = common.compute_per_token_logps(graph, state, prompts, inputs.completions, pad, end)
        np.save(file, np.asarray(found, np.float32))

    return System(
        phases={"step": step, "prefill": prefill},
        checks={"greedy": greedy, "logprobs": save_logprobs},
        peak_device_bytes=lambda: (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        packages=("google-tunix", "jax", "flax"),
        notes={
            "sampler": "Tunix's own, `vanilla`",
            "patched": "the rotary base of its Llama, which ignores the config's",
        },
    )


if __name__ == "__main__":
    serve(prepare)
