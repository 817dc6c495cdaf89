"""Load on the recording server: clients that stream at one time, and the engine alone at the same requests.

    python -m benchmarks.serving --model smollm2 --clients 64 --requests 128 --tokens 64

Starts `python -m recjax.serve` with its record in a temporary folder, sends every request once to warm up programs, and
then measures. The engine alone samples the same number of completions of the same prompts and lengths in this process,
in as many slots, after a warm-up of its own; the server is gone by then. Prints one JSON object.
"""

import asyncio
import json
import logging
import re
import signal
import subprocess
import sys
import tempfile
import time

import httpx
import jax
import numpy as np
from absl import app, flags

from recjax.models.placement import put_params
from recjax.models.sampling import Sampling
from recjax.models.trainable import in_compute_dtype
from recjax.rollout.engine import Engine
from recjax.rollout.requests import Request
from recjax.serve import load as policy_of

PROMPT = "Question {}: what comes after this? Answer:"


async def ask(client: httpx.AsyncClient, number: int, tokens: int) -> tuple[float, float, int]:
    """Seconds to the first tokens and to the end, and tokens, of one streamed completion."""
    body = {"prompt": PROMPT.format(number), "max_tokens": tokens, "stream": True, "return_token_ids": True}
    began, first, count = time.perf_counter(), None, 0
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                new = sum(len(choice.get("token_ids", [])) for choice in chunk["choices"])
                first = first or (time.perf_counter() - began if new else None)
                count += new
    return first, time.perf_counter() - began, count


async def load(address: str, clients: int, requests: int, tokens: int) -> dict[str, float]:
    """So many clients at a time, each with its next request as soon as it has its reply."""
    numbers, done, errors = iter(range(requests)), [], []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as client:

        async def one_client() -> None:
            for number in numbers:
                try:
                    done.append(await ask(client, number, tokens))
                except (httpx.HTTPError, RuntimeError) as error:
                    errors.append(repr(error))

        began = time.perf_counter()
        await asyncio.gather(*(one_client() for _ in range(clients)))
        seconds = time.perf_counter() - began
    first, whole, counts = (np.array(column) for column in zip(*done, strict=True))
    return {
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "first_tokens_p50_s": round(float(np.quantile(first, 0.5)), 3),
        "first_tokens_p99_s": round(float(np.quantile(first, 0.99)), 3),
        "whole_p50_s": round(float(np.quantile(whole, 0.5)), 3),
        "sampled_tokens": int(counts.sum()),
        "tokens_per_s": round(float(counts.sum() / seconds), 1),
    }


def alone(model: str, slots: int, requests: int, tokens: int) -> float:
    """Tokens a second of the engine without a server."""
    _, policy, params, _ = policy_of(None, None, model)
    engine = Engine(policy.decoder, policy.stop_ids, slots=slots, prefix_time=64)
    engine.replace_weights(in_compute_dtype(policy.decoder, put_params(params), copy=False), 0)
    prompts = [np.array(policy.tokenizer.encode(PROMPT.format(number)), np.int32) for number in range(requests)]
    for attempt in range(2):
        keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(attempt), requests)))
        began = time.perf_counter()
        engine.admit([Request(prompt, key, tokens, Sampling()) for prompt, key in zip(prompts, keys, strict=True)])
        sampled = sum(len(one.tokens) for one in engine.drain().values())
        rate = sampled / (time.perf_counter() - began)
    return round(rate, 1)


def define_flags() -> None:
    """The command's flags, defined when it is run and not when it is imported."""
    flags.DEFINE_string("model", None, "Folder of the model.", required=True)
    flags.DEFINE_integer("clients", 64, "Requests under way at one time.", lower_bound=1)
    flags.DEFINE_integer("requests", 128, "Requests.", lower_bound=1)
    flags.DEFINE_integer("tokens", 64, "Limit on a completion.", lower_bound=1)
    flags.DEFINE_integer("slots", 16, "Completions that are sampled at one time.", lower_bound=1)


def main(argv: list[str]) -> None:
    """Measures and prints."""
    asked = flags.FLAGS
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--model={asked.model}", f"--slots={asked.slots}", f"--record={folder}", "--port=0"]
        process = subprocess.Popen([sys.executable, "-m", "recjax.serve", *options], stdout=subprocess.PIPE, text=True)
        address = re.search(r"http://[^/]*", process.stdout.readline()).group()
        asyncio.run(load(address, asked.clients, asked.clients, asked.tokens))
        found = asyncio.run(load(address, asked.clients, asked.requests, asked.tokens))
        process.send_signal(signal.SIGTERM)
        process.wait()
    rate = alone(asked.model, asked.slots, asked.requests, asked.tokens)
    share = round(found["tokens_per_s"] / rate, 3)
    said = {name: getattr(asked, name) for name in ("model", "clients", "requests", "tokens", "slots")}
    print(json.dumps(said | found | {"engine_alone_tokens_per_s": rate, "share_of_engine": share}, indent=1))


if __name__ == "__main__":
    define_flags()
    app.run(main)
