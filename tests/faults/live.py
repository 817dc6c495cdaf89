"""SIGKILLs of a server and of the trainer that follow each other, under load: nothing is lost or trained on twice."""

import contextlib
import json
import os
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
from absl import flags

from recjax import serve
from recjax.config import load_config
from recjax.experience.group import Row
from recjax.hub.policy import policy_alone
from recjax.logs.metrics import read_metrics
from recjax.runs import start
from recjax.runs.checkpoint import newest_whole, progress
from recjax.runtime.console import command
from recjax.store.following import Follower
from recjax.store.store import Store
from recjax.tasks.loading import load_task
from recjax.tasks.problems import characters
from recjax.training import loop
from tests.experience.rows import Columns, read_columns
from tests.faults.database import Database
from tests.faults.outcomes import Outcome
from tests.faults.runs import SECONDS, Place, keep_programs

FOLLOWS = [
    "experience.follow=true",
    "rollout.max_context_tokens=16",
    "training.checkpoint_every=3",
    "evaluation.every=0",
    "evaluation.problems=5",
    "samples={every: 1, groups: 4}",
]
SERVES = ["--port=0", "--reward_seconds=1", "--max_completion_tokens=3", "--slots=8"]
ASKERS = 3


def kills_of_both(place: Place, count: int, seed: int, database: Database | None = None) -> Iterator[Outcome]:
    """`count` kills, of the server, the trainer, or both at once; then both end, and what is on disk is compared.

    Args:
        database: server of databases to record into, which is restarted after every second kill; None: a file.
    """
    folder = place.folder / ("live in a database" if database else "live")
    folder.mkdir(parents=True)
    both, load = _Both(place, folder, database), _Load()
    chance, killed = random.Random(seed), []
    try:
        both.start("server"), both.start("trainer")
        load.begin(lambda: both.address)
        while len(killed) < count:
            if chance.random() < 0.8:  # otherwise it may come while they start
                both.wait_for(2)
            time.sleep(chance.uniform(0.0, 3.0))
            which = chance.choice([("server",), ("trainer",), ("server", "trainer")])
            both.check_alive()
            for name in which:
                both.kill(name)
            for name in which:
                both.start(name)
            killed.append(" and ".join(which))
            if database and len(killed) % 2 == 0:
                time.sleep(chance.uniform(0.0, 3.0))
                database.restart()
        # Both have to go on from there.
        both.wait_for(6)
        load.end()
        both.end("trainer"), both.end("server")
        wrong = _wrong(both, load)
    except AssertionError as error:
        wrong = str(error)
    finally:
        load.end()
        both.kill("server"), both.kill("trainer")
    for which in killed or ["nobody"]:
        yield Outcome(f"SIGKILL, live, {which}", "NOT" if wrong else "as without", wrong)
    for _ in range(database.restarts if database else 0):
        yield Outcome("restart, live, database", "NOT" if wrong else "as without", wrong)
    counts = {"kills": len(killed), "restarts": database.restarts if database else 0, "steps": both.steps()}
    counts |= {
        "replies": len(load.answered),
        "rewards": len(load.rewarded),
        "turns": sum(map(len, load.turns.values())),
    }
    counts |= {"requests refused while the database was away": load.refused}
    print(f"live: {', '.join(f'{count} {name}' for name, count in counts.items())}", file=sys.stderr)


class _Both:
    """The two processes, each of which can be killed and started again."""

    def __init__(self, place: Place, folder: Path, database: Database | None):
        self._place, self._folder, self._processes = place, folder, {}
        self.output, self.store = folder / "run", database.url if database else folder / "store"
        self.options = [*FOLLOWS, f"experience.store={self.store}", f"output={self.output}", "training.steps=100000"]

    def start(self, name: str) -> None:
        """Starts one of them; it says things to a file."""
        log = self._folder / f"{name}{len(list(self._folder.glob(f'{name}*.log')))}.log"
        target, arguments = {
            "server": (_serve, [f"--follow={self.output}", f"--record={self.store}", *SERVES]),
            "trainer": (_train, [self._place.config, *self.options]),
        }[name]
        log.touch()
        process = self._place.forks.Process(target=target, args=(arguments, str(log), str(self._place.folder)))
        process.start()
        self._processes[name] = process, log

    def kill(self, name: str) -> None:
        if name in self._processes:
            self._processes[name][0].kill()
            self._processes[name][0].join()

    def end(self, name: str) -> None:
        """Ends one as it is meant to be ended."""
        process, _ = self._processes[name]
        self.check_alive()
        process.terminate()
        process.join(SECONDS)
        assert process.exitcode == 0, f"the {name} has ended with {process.exitcode}: {self.said(name)[-500:]}"
        del self._processes[name]

    def check_alive(self) -> None:
        for name, (process, _) in self._processes.items():
            assert process.is_alive(), f"the {name} has ended with {process.exitcode}: {self.said(name)[-500:]}"

    def wait_for(self, steps: int) -> None:
        """Returns when the server answers and the run has made so many more steps."""
        before, deadline = None, time.monotonic() + SECONDS
        while before is None or self.steps() < before + steps:
            assert time.monotonic() < deadline, f"the run stands still: {self.said('trainer')[-300:]}"
            self.check_alive()
            before = self.steps() if before is None and self.address else before
            time.sleep(0.05)

    def said(self, name: str) -> str:
        log = sorted(self._folder.glob(f"{name}*.log"), key=lambda path: int(re.sub(r"\D", "", path.stem)))[-1]
        return log.read_text(errors="replace")

    def steps(self) -> int:
        """That the run has logged."""
        rows = read_metrics(self.output / "metrics.jsonl")
        return rows[-1]["step"] if rows else 0

    @property
    def address(self) -> str | None:
        """Of the server that was started last, once it answers."""
        log = self._processes["server"][1] if "server" in self._processes else None
        found = re.search(r"\bserving .* at (http://[^/]*)", log.read_text(errors="replace")) if log else None
        return found and found.group(1)


class _Load:
    """Clients that ask, and give rewards late and out of order until each is acknowledged."""

    def __init__(self):
        self.answered: dict[str, dict] = {}
        self.rewarded: dict[str, float] = {}
        self.turns: dict[str, list[list[int]]] = {}  # tokens of each turn of a session, by the id of its completion
        self.refused = 0
        self.wrong: list[str] = []
        self._ended, self._threads = threading.Event(), []

    def begin(self, address) -> None:
        self._threads = [threading.Thread(target=self._ask, args=(address, number)) for number in range(ASKERS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, address, number: int) -> None:
        chance, waiting = random.Random(number), []
        while not self._ended.is_set():
            url = address()
            if url is None:
                time.sleep(0.05)
                continue
            try:
                with httpx.Client(base_url=url, timeout=60) as client:
                    self._talk(client, chance, waiting)
            except httpx.HTTPError:
                time.sleep(0.05)

    def _talk(self, client: httpx.Client, chance: random.Random, waiting: list[tuple[str, float]]) -> None:
        while not self._ended.is_set():
            prompt = f"{chance.randint(1, 9)}+{chance.randint(1, 9)}="
            asked = {"prompt": prompt, "n": 4, "max_tokens": 3, "return_token_ids": True}
            answer = client.post("/v1/completions", json=asked)
            if answer.status_code != 200:
                self._note(answer)
                return
            reply = answer.json()
            self.answered[reply["id"]] = reply
            waiting += [(f"{reply['id']}/{place}", chance.choice([0.0, 0.5, 1.0])) for place in range(4)]
            while len(waiting) > 16:  # most of them while the rows are in the store
                row, reward = waiting[chance.randrange(len(waiting))]
                given = client.post("/v1/feedback", json={"id": row, "reward": reward})
                if given.status_code != 200:
                    self._note(given)
                    return
                self.rewarded[row] = reward
                waiting.remove((row, reward))
            self._converse(client, chance, waiting)

    def _converse(self, client: httpx.Client, chance: random.Random, waiting: list[tuple[str, float]]) -> None:
        """Takes turns in a session of its own, which get their reward as the other completions do.

        They are too long for the run, which trains on groups of the others.
        """
        name = f"{chance.randrange(10**12)}"
        for _ in range(3):
            asked = {"prompt": "1+" * 20, "max_tokens": 3, "return_token_ids": True}
            answer = client.post(f"/sessions/{name}/v1/completions", json=asked)
            if answer.status_code == 409 and "session_over" in answer.text:  # the next turn was late
                break
            if answer.status_code != 200:
                self._note(answer)
                break
            self.turns.setdefault(f"session/{name}", []).append(answer.json()["choices"][0]["token_ids"])
        if f"session/{name}" in self.turns:
            waiting.append((f"session/{name}", chance.choice([0.0, 0.5, 1.0])))

    def _note(self, answer: httpx.Response) -> None:
        """A refusal is wrong, unless the database is away."""
        if answer.status_code == 503 and "the server must record all replies" in answer.text:
            self.refused += 1
        else:
            self.wrong.append(answer.text)


def _wrong(both: _Both, load: _Load) -> str:
    """What is on disk otherwise than it should be; empty where nothing is."""
    if load.wrong:
        return f"a request was refused: {load.wrong[0]}"
    rows = {row.id: row for row in read_columns(both.store)}
    for name, reply in load.answered.items():
        for place, choice in enumerate(reply["choices"]):
            row = rows.get(f"{name}/{place}")
            if row is None or row.completion_tokens.tolist() != choice["token_ids"]:
                return f"{name}/{place}: a reply was sent, and the store has {'another' if row else 'none'}"
            if row.policy_version != min(choice["token_policy_versions"]):
                return f"{name}/{place}: version {row.policy_version}, and its tokens have others"
    for name, turns in load.turns.items():
        row = rows.get(name)
        said = iter(()) if row is None else iter(_sampled(row))
        if not all(turn in said for turn in turns):  # in their order; a turn that nobody heard of may be between them
            return f"{name}: {len(turns)} turns were sent, and the store has {'others' if row else 'none'}"
    if lost := [name for name, reward in load.rewarded.items() if rows[name].reward != reward]:
        return f"{len(lost)} rewards were acknowledged and are not there, such as that of {lost[0]}"
    steps, trained = both.steps(), Counter()
    for step in range(1, steps + 1):
        kept = _kept(both.output, step)
        trained.update(kept.keys())
        if len(kept) != 16:
            return f"step {step} has trained on {len(kept)} completions, not 16"
        if unknown := [name for name, reward in kept.items() if rows[name].reward != reward]:
            return f"step {step} has trained on {unknown[0]} with a reward that it does not have"
    if twice := [name for name, times in trained.items() if times > 1]:
        return f"{len(twice)} completions were trained on twice, such as {twice[0]}"
    rows = {name: row for name, row in rows.items() if name not in load.turns and not name.startswith("session/")}
    whole = Counter(row.group_id for row in rows.values() if row.reward is not None)
    whole = {row.id for row in rows.values() if whole[row.group_id] == 4}
    left, taken, held = _left(both)
    if taken & left or taken | left != whole:
        return f"{len(taken)} completions were taken and {len(left)} left; {len(whole)} have their rewards"
    if not trained.keys() <= taken or len(taken) - len(trained) != 4 * held:
        return f"{len(taken)} completions were taken, {len(trained)} trained on, and {held} groups are in the queue"
    return ""


def _sampled(row: Columns) -> list[list[int]]:
    """The sampled tokens of each turn of a session."""
    rows = row.rows or [Row((), row.completion_tokens, row.completion_mask, None)]
    turns = []
    for one in rows:
        ends = np.flatnonzero(np.diff(one.mask.astype(int), prepend=0, append=0)).reshape(-1, 2)
        turns += [one.tokens[begin:end].tolist() for begin, end in ends]
    return turns


def _kept(output: Path, step: int) -> dict[str, float]:
    """Completions that a step trained on, and their rewards."""
    (path,) = (output / "samples").rglob(f"*{step:06d}.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["id"]: row["reward"] for row in rows}


def _left(both: _Both) -> tuple[set[str], set[str], int]:
    """By the newest checkpoint: completions that are left to train on, those that were taken from the store, and how
    many groups of these are in the queue, since the run was ended while it waited for more."""
    step, _ = newest_whole(both.output / "checkpoints")
    said = progress(both.output / "checkpoints", step)
    assert step == both.steps(), f"the checkpoint is of step {step}, and the last row of {both.steps()}"
    config = load_config(both.output / "config.yaml", [])
    task = load_task(config)
    policy = policy_alone(config, characters([*task.train, *task.evaluation]))
    state = said["source"]
    follower = Follower(config, policy, said["totals"]["run"], state)
    with Store(both.store) as store:
        names = {number: name for name, (number,) in store.numbers("id").items()}
    not_taken = {number for first, end in state["left"] for number in range(first, end + 1)}
    taken = {name for number, name in names.items() if number <= state["read"] and number not in not_taken}
    taken = {name for name in taken if not name.startswith("session/")}  # which are too long
    left = {one.id for group in follower.poll(step + 1, len(names)).groups for one in group.completions}
    return left, taken, len(said["queue"]["waiting"]) + len(said["queue"]["ready"])


def _said_to(log: str, folder: str) -> None:
    """What a process says from now on goes to a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1), os.dup2(file, 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ["RECJAX_CACHE"] = f"{folder}/cache"
    keep_programs(folder)


def _serve(arguments: list[str], log: str, folder: str) -> None:
    _said_to(log, folder)
    serve.define_flags()
    flags.FLAGS(["serve", *arguments])
    serve.main([])


def _train(arguments: list[str], log: str, folder: str) -> None:
    _said_to(log, folder)
    config, *options = arguments
    flags.FLAGS(["train"])
    with contextlib.suppress(loop.Preempted):
        command(lambda argv: start.train(load_config(config, options)))([])
