"""The strongest plain torch that we could write: own decode loop and update, each compiled where that is faster."""

import functools
import time

import torch
from transformers import AutoTokenizer

from benchmarks.workers import torch_grpo as grpo
from benchmarks.workers import torch_llama as llama
from benchmarks.workers.protocol import Inputs, Stopwatch, System, serve
from benchmarks.workers.torch_decode import decode_step, generate

MOST_WHOLE = 8  # layers; a program of more takes minutes to compile, one of a layer serves them all


def prepare(inputs: Inputs) -> System:
    """The model, and its timed phases. Option `shared`: prompts are read once a group in decode and update too."""
    shape, shared = inputs.shape, inputs.options["shared"]
    dtype, limit = getattr(torch, inputs.precision), inputs.shape["completion_tokens"]
    sizes, weights = llama.load(inputs.folder / "model", grpo.DEVICE)
    parameters = list(weights.values())
    optimizer = grpo.optimizer_of(parameters)
    tokenizer = AutoTokenizer.from_pretrained(inputs.folder / "model")
    prompts = grpo.prompt_tokens(inputs)
    run, notes = {"behavior": None}, {"device": _device_name()}

    def logprobs_of(some: torch.Tensor, completions: torch.Tensor, block=llama.block) -> torch.Tensor:
        used = llama.cast(weights, dtype)
        hidden = llama.completion_hidden(sizes, used, some, completions, shared, block)
        return grpo.token_logprobs(functools.partial(llama.scores, used), hidden, completions, shape["vocabulary"])

    def drawn(step, max_tokens: int = limit, group: int = shape["group_size"], greedy: bool = False):
        used = {name: weight.detach() for name, weight in llama.cast(weights, dtype).items()}
        result = generate(sizes, used, prompts, group, max_tokens, shape["stop_ids"], shared, step, greedy)
        grpo.synchronize()
        return result

    def gradients(logprobs_of, batch: tuple) -> None:
        grpo.accumulate(logprobs_of, inputs, prompts, *batch)
        grpo.synchronize()
        optimizer.zero_grad(set_to_none=True)

    torch._dynamo.config.recompile_limit = 64  # one program for each length of the cache, and for each shape of update
    ways = {"decode": {"eager": decode_step}, "update": {"eager": logprobs_of}}
    if sizes.layers <= MOST_WHOLE:
        ways["decode"]["compiled"] = torch.compile(decode_step, dynamic=False)
        ways["update"]["compiled"] = torch.compile(logprobs_of, dynamic=False)
    else:
        block, draw = (torch.compile(function, dynamic=False) for function in (llama.block, grpo.drawn_tokens))
        ways["decode"]["compiled by layer"] = functools.partial(decode_step, block=block, draw=draw)
        ways["update"]["compiled by layer"] = functools.partial(logprobs_of, block=block)

    def choose() -> None:
        run["decode"] = _fastest("decode", ways["decode"], drawn, notes)
        tokens, logprobs, mask = drawn(run["decode"])
        rewards = torch.rand(shape["rows"], device=grpo.DEVICE)
        batch = (tokens, mask, logprobs, rewards)
        run["update"] = _fastest("update", ways["update"], functools.partial(gradients, batch=batch), notes)

    def step(number: int) -> dict:
        if "update" not in run:
            choose()
        watch = Stopwatch()
        tokens, logprobs, mask = drawn(run["decode"])
        watch.part("generate")
        rewards = grpo.graded(inputs, tokenizer, tokens, mask)
        watch.part("grade")
        grpo.accumulate(run["update"], inputs, prompts, tokens, mask, logprobs, rewards)
        grpo.apply(optimizer, parameters)
        grpo.synchronize()
        watch.part("update")
        return {"inside": watch.seconds, "tokens": int(mask.sum()), "notes": notes}

    def prefill(number: int) -> dict:
        drawn(decode_step, 1)
        return {}

    def rescore(number: int) -> dict:
        grpo.compared_logprobs(inputs, logprobs_of)
        return {}

    return System(
        phases={
            "step": step,
            "prefill": prefill,
            "drawing": lambda number: grpo.drawing(inputs),
            "rescore": rescore,
            "checkpoint": lambda number: grpo.write_checkpoint(inputs, weights, optimizer),
        },
        checks={
            "greedy": lambda: drawn(decode_step, group=1, greedy=True)[0].tolist(),
            "logprobs": lambda file: grpo.save_logprobs(inputs, logprobs_of, file),
            "loss": lambda file: grpo.compared_loss(inputs, parameters, logprobs_of, file),
            "peaks": lambda: grpo.peaks(inputs),
        },
        peak_device_bytes=grpo.peak_device_bytes,
        packages=("torch",),
        notes=notes,
    )


def _fastest(name: str, ways: dict, run, notes: dict):
    """The fastest way of three runs; a failing one is skipped. Notes the choice, and the seconds of each."""
    least = {}
    for way, function in ways.items():
        try:
            run(function)  # compiles
            seconds = []
            for _ in range(3):
                started = time.perf_counter()
                run(function)
                seconds.append(time.perf_counter() - started)
            least[way] = min(seconds)
        except Exception as error:
            notes[f"{name}: {way}"] = f"failed: {error}"[:200]
    chosen = min(least, key=least.get)
    notes[name] = f"{chosen}, the fastest of {', '.join(f'{way} {least[way]:.3f} s' for way in least)}"
    return ways[chosen]


def _device_name() -> str:
    return torch.cuda.get_device_name() if grpo.DEVICE.type == "cuda" else "cpu"


if __name__ == "__main__":
    serve(prepare)
