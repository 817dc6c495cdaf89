"""Load on the recording server, in turn with the engine without a server: the same requests, as many at the same time.

    python -m benchmarks.serving --model models/SmolLM2-135M-Instruct
    python -m benchmarks.serving --model random         # 5.2 million parameters, random weights

Starts `python -m recjax.serve`, whose record is a temporary folder, and an engine in this process. Each has a warm-up,
and then they take turns with the same requests, until the server has been under load for `--seconds`; while one works
the other waits. A client streams a completion, and sends its next request as soon as that is whole; the engine
without a server admits a request as soon as another one ends. Requests are chats, where the model has a template for
these, with seeds, so that both sample the same tokens, and limits between a quarter of `--tokens` and all. Clients
share the machine with the server. Prints one JSON object.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import psutil
from absl import app, flags
from transformers import PreTrainedTokenizerBase

from benchmarks.inputs import word_tokenizer, write_random_model
from benchmarks.run import machine
from benchmarks.shapes import SMALL
from recjax.hub.tokenizers import encode_prompts
from recjax.models.sampling import Sampling
from recjax.rollout.engine import Engine
from recjax.rollout.requests import Request
from recjax.runtime.cache import keep_compiled_programs
from recjax.serve import load as load_model
from recjax.serving.running import PREFIX_TIME
from recjax.serving.sampler import Limits, Sampler

QUESTION = "Write a few sentences about what happened in the year {}, and why."
WORDS = 32  # of a random model's prompt


class Ask(NamedTuple):
    """A request: its path, its prompt for the server and for the model, its seed, the most tokens."""

    path: str
    prompt: dict
    text: str
    seed: int
    limit: int

    @property
    def body(self) -> dict:
        """As the server takes it."""
        return self.prompt | {"seed": self.seed, "max_tokens": self.limit, "stream": True, "return_token_ids": True}


class Reply(NamedTuple):
    """A streamed completion: seconds to its first piece, tokens of that, seconds to its last one, all tokens."""

    first: float
    first_tokens: int
    whole: float
    tokens: list[int]


def asks_of(tokenizer: PreTrainedTokenizerBase, number: int, tokens: int) -> list[Ask]:
    """So many requests, the same at each call."""
    random = np.random.default_rng(0)
    limits = random.integers(max(tokens // 4, 1), tokens + 1, number).tolist()
    if tokenizer.chat_template is None:
        texts = [tokenizer.decode(ids) for ids in random.integers(1, len(tokenizer) - 1, (number, WORDS))]
        prompts = [("/v1/completions", {"prompt": text}, text) for text in texts]
    else:
        chats = [[{"role": "user", "content": QUESTION.format(1700 + place)}] for place in range(number)]
        texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        prompts = [("/v1/chat/completions", {"messages": chat}, text) for chat, text in zip(chats, texts, strict=True)]
    return [Ask(*prompt, seed, limit) for seed, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))]


# --- The server.


@contextlib.contextmanager
def server(model: str, slots: int, clients: int, record: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Address and process of a server that ends with the block."""
    options = [f"--model={model}", f"--slots={slots}", f"--queue={clients}", f"--record={record}", "--port=0"]
    process = subprocess.Popen([sys.executable, "-m", "recjax.serve", *options], stdout=subprocess.PIPE, text=True)
    try:
        yield re.search(r"http://[^/]*", process.stdout.readline()).group(), psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


async def streamed(client: httpx.AsyncClient, ask: Ask) -> Reply:
    """The completion of a request.

    Raises:
        RuntimeError: the stream ends with an error.
    """
    began, first, first_tokens, tokens = time.perf_counter(), None, 0, []
    async with client.stream("POST", ask.path, json=ask.body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            tokens += [token for choice in chunk["choices"] for token in choice.get("token_ids", [])]
            if tokens and first is None:
                first, first_tokens = time.perf_counter() - began, len(tokens)
    if first is None:
        raise RuntimeError("the stream has no tokens")
    return Reply(first, first_tokens, time.perf_counter() - began, tokens)


async def served(address: str, asks: Sequence[Ask], clients: int) -> tuple[float, dict[int, Reply], list[str]]:
    """Seconds that the server needs, replies by seed, and errors."""
    left, replies, errors = iter(asks), {}, []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as client:

        async def one_client() -> None:
            for ask in left:
                try:
                    replies[ask.seed] = await streamed(client, ask)
                except (httpx.HTTPError, RuntimeError) as error:
                    errors.append(repr(error))

        began = time.perf_counter()
        await asyncio.gather(*(one_client() for _ in range(clients)))
        return time.perf_counter() - began, replies, errors


# --- The engine without a server.


class Alone:
    """An engine with the model that is served, in as many slots."""

    def __init__(self, model: str, slots: int, clients: int):
        """Loads the model."""
        keep_compiled_programs()
        _, policy, weights, _ = load_model(None, None, model, None)
        self._engine = Engine(policy.decoder, policy.stop_ids, slots=slots, prefix_time=PREFIX_TIME)
        self._engine.replace_weights(weights.params, weights.version)
        self.tokenizer, self._clients = policy.tokenizer, clients
        self._sampler = Sampler(None, policy, Limits(2048, 1024, slots, clients, 1), 0)  # for the keys of seeds

    def _request(self, ask: Ask) -> Request:
        prompt = np.array(encode_prompts(self.tokenizer, [ask.text])[0], np.int32)
        return Request(prompt, self._sampler.keys(ask.seed, 1)[0], ask.limit, Sampling())

    def sample(self, asks: Sequence[Ask]) -> tuple[float, dict[int, list[int]]]:
        """Seconds that the engine needs, and tokens by seed."""
        left, seeds, tokens = iter([(ask.seed, self._request(ask)) for ask in asks]), {}, {}
        began, room = time.perf_counter(), self._clients
        while room or seeds:
            for seed, request in itertools.islice(left, room):
                seeds[self._engine.admit([request])[0]] = seed
            finished = self._engine.step() if seeds else {}
            tokens |= {seeds.pop(ticket): one.tokens.tolist() for ticket, one in finished.items()}
            room = len(finished)
        return time.perf_counter() - began, tokens


# --- Both in turn.


class Turn(NamedTuple):
    """The same requests to both: tokens, seconds, and processor seconds of all threads."""

    server_seconds: float
    server_cpu: float
    clients_cpu: float
    replies: dict[int, Reply]
    errors: list[str]
    alone_seconds: float
    alone_cpu: float
    alone_tokens: dict[int, list[int]]

    @property
    def served_rate(self) -> float:
        """Tokens a second of the server."""
        return sum(len(reply.tokens) for reply in self.replies.values()) / self.server_seconds

    @property
    def alone_rate(self) -> float:
        """Tokens a second of the engine without a server."""
        return sum(map(len, self.alone_tokens.values())) / self.alone_seconds


def turn(address: str, process: psutil.Process, alone: Alone, asks: Sequence[Ask], clients: int, first: str) -> Turn:
    """Both in turn, beginning with `first`."""

    def by_server() -> tuple:
        before, began = process.cpu_times(), time.process_time()
        seconds, replies, errors = asyncio.run(served(address, asks, clients))
        after = process.cpu_times()
        cpu = after.user + after.system - before.user - before.system
        return seconds, cpu, time.process_time() - began, replies, errors

    def by_engine() -> tuple:
        began = time.process_time()
        seconds, tokens = alone.sample(asks)
        return seconds, time.process_time() - began, tokens

    if first == "server":
        return Turn(*by_server(), *by_engine())
    engine = by_engine()
    return Turn(*by_server(), *engine)


def quantiles(values: Sequence[float], digits: int) -> dict[str, float]:
    """The median and the 99th of a hundred."""
    return {name: round(float(np.quantile(values, share)), digits) for name, share in (("p50", 0.5), ("p99", 0.99))}


def summary(turns: Sequence[Turn]) -> dict:
    """The printed summary of all turns."""
    replies = [reply for one in turns for reply in one.replies.values()]
    later = [reply for reply in replies if len(reply.tokens) > reply.first_tokens]
    errors = [error for one in turns for error in one.errors]
    costs = [1 - one.served_rate / one.alone_rate for one in turns]
    same = [reply.tokens == one.alone_tokens[seed] for one in turns for seed, reply in one.replies.items()]
    return {
        "turns": len(turns),
        "seconds_under_load": round(sum(one.server_seconds for one in turns), 1),
        "completions": len(replies),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "same_tokens_as_alone": round(float(np.mean(same)), 4),
        "first_token_s": quantiles([reply.first for reply in replies], 3),
        "output_token_ms": quantiles(
            [1000 * (reply.whole - reply.first) / (len(reply.tokens) - reply.first_tokens) for reply in later], 2
        ),
        "served_tokens_per_s": round(float(np.median([one.served_rate for one in turns])), 1),
        "alone_tokens_per_s": round(float(np.median([one.alone_rate for one in turns])), 1),
        "cost": round(float(np.median(costs)), 3),
        "cost_by_turn": [round(cost, 3) for cost in costs],
        "cpu_s": {
            "server": round(sum(one.server_cpu for one in turns), 1),
            "clients": round(sum(one.clients_cpu for one in turns), 1),
            "alone": round(sum(one.alone_cpu for one in turns), 1),
        },
    }


def define_flags() -> None:
    """The command's flags, defined when it is run and not when it is imported."""
    flags.DEFINE_string("model", None, "Folder of the model, or random.", required=True)
    flags.DEFINE_integer("clients", 64, "Open requests at the same time.", lower_bound=1)
    flags.DEFINE_float("seconds", 120, "That the server is under load.", lower_bound=0)
    flags.DEFINE_integer("requests", 256, "Requests of a turn.", lower_bound=1)
    flags.DEFINE_integer("tokens", 128, "Limit on a completion.", lower_bound=1)
    flags.DEFINE_integer("slots", 64, "Completions that are sampled together.", lower_bound=1)


def measured(model: str, folder: Path) -> list[Turn]:
    """All turns but the warm-up."""
    asked, turns = flags.FLAGS, []
    alone = Alone(model, asked.slots, asked.clients)
    asks = asks_of(alone.tokenizer, asked.requests, asked.tokens)
    with server(model, asked.slots, asked.clients, folder / "record") as (address, process):
        turn(address, process, alone, asks, asked.clients, "server")
        for first in itertools.cycle(("server", "alone")):
            turns.append(turn(address, process, alone, asks, asked.clients, first))
            if sum(one.server_seconds for one in turns) >= asked.seconds:
                return turns


def main(argv: list[str]) -> None:
    """Measures and prints."""
    asked = flags.FLAGS
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), asked.model
        if model == "random":
            model = f"{folder}/random"
            write_random_model(Path(model), SMALL, word_tokenizer(SMALL.vocabulary))
        turns = measured(model, folder)
    said = {name: getattr(asked, name) for name in ("model", "clients", "requests", "tokens", "slots")}
    print(json.dumps(machine() | said | summary(turns), indent=1))


if __name__ == "__main__":
    define_flags()
    app.run(main)
