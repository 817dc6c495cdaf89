"""Agents, tools and an environment for tests."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import numpy as np

from recjax.agents.agent_policy import AgentPolicy, Seats
from recjax.tasks.problems import Problem

events: list[str] = []


async def one_turn(problem: Problem, policy: AgentPolicy) -> None:
    """What a run without an agent does."""
    await policy.complete(problem.prompt)


STOPS = list("abcdefghijklm")


async def stops(problem: Problem, policy: AgentPolicy) -> None:
    """One turn that ends with any of some letters."""
    await policy.complete(problem.prompt, stop=STOPS)


async def several_turns(problem: Problem, policy: AgentPolicy) -> dict[str, float]:
    """Three turns with something in between; one of them in another context."""
    reply = await policy.complete(problem.prompt)
    more = await policy.complete(problem.prompt + reply.raw + "12")
    beside = await policy.complete("7" + problem.prompt, max_tokens=2)
    last = await policy.complete([*more.prompt_tokens, *more.tokens, *beside.tokens])
    return {"digits": sum(character.isdigit() for character in reply.text + last.text) / 6, "accuracy": 0.0}


async def paid_by_turn(problem: Problem, policy: AgentPolicy) -> float:
    """Three turns, of which two get rewards and the last one is in another context."""
    reply = await policy.complete(problem.prompt)
    more = await policy.complete(problem.prompt + reply.raw)
    policy.reward(0.5)
    policy.reward(0.25, reply)
    policy.reward(0.25, more)
    await policy.complete("7" + problem.prompt, max_tokens=2)
    if problem.answer == "37":
        raise KeyError("a mistake")
    return 1.0


async def paid_by_answer(problem: Problem, policy: AgentPolicy) -> float:
    """Three turns, each of which is rewarded for its digits."""
    text = problem.prompt
    for _ in range(3):
        reply = await policy.complete(text)
        policy.reward(sum(character.isdigit() for character in reply.text) / 3)
        text += reply.raw + "1"
    return 0.0


async def fails_at_even_answers(problem: Problem, policy: AgentPolicy) -> float:
    """One turn, after which some agents raise."""
    await policy.complete(problem.prompt)
    return 1.0 / (int(problem.answer) % 2)


async def at_once(problem: Problem, policy: AgentPolicy) -> float:
    """Two replies at one time."""
    both = await asyncio.gather(*(policy.complete(problem.prompt) for _ in range(2)))
    return float(len({*(reply.text for reply in both)}))


async def one_chat(problem: Problem, policy: AgentPolicy) -> None:
    """One turn of a chat."""
    await policy.chat([{"role": "user", "content": problem.prompt}], max_tokens=4)


async def asks_briefly(problem: Problem, policy: AgentPolicy) -> None:
    """One turn of a chat with a variable of the template."""
    messages = [{"role": "user", "content": problem.prompt}]
    await policy.chat(messages, max_tokens=4, chat_template_kwargs={"brief": True})


async def talks(problem: Problem, policy: AgentPolicy) -> None:
    """Two turns of a chat."""
    messages = [{"role": "user", "content": problem.prompt}]
    for _ in range(2):
        reply = await policy.chat(messages, max_tokens=4)
        messages += [reply.message, {"role": "user", "content": "1+1"}]


async def has_a_client(problem: Problem, policy: AgentPolicy) -> dict[str, float]:
    """Two turns of a chat by way of HTTP, as the problem's column `do` says."""
    messages = [{"role": "user", "content": problem.prompt}]
    headers = {"Authorization": f"Bearer {policy.api_key}"}
    if problem.columns["do"] == "stranger":
        headers = {"Authorization": "Bearer 1234"}
    body = {"model": "any", "max_tokens": 4, "temperature": None}
    if problem.columns["do"] == "hot":
        body["temperature"] = 0.5
    if problem.columns["do"] == "long":
        messages[0]["content"] *= 100
    async with httpx.AsyncClient(base_url=policy.base_url, headers=headers) as client:
        for _ in range(2):
            answer = await client.post("/chat/completions", json=body | {"messages": messages})
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {answer.json()['error']['message']}")
            choice = answer.json()["choices"][0]
            messages += [choice["message"], {"role": "user", "content": "1+1"}]
    return {"seen": float(answer.json()["usage"]["completion_tokens"])}


async def rests(problem: Problem, policy: AgentPolicy) -> float:
    """Two turns, and between them a tenth of a second of something else."""
    await policy.complete(problem.prompt)
    await asyncio.sleep(0.1)
    await policy.complete(problem.prompt)
    return 1.0


async def by_column(problem: Problem, policy: AgentPolicy):
    """Does what the problem's column `do` says."""
    what = problem.columns["do"]
    if what == "silent":
        return 1.0
    if what == "silent raise":
        raise KeyError("a mistake")
    reply = await policy.complete(problem.prompt)
    match what:
        case "raise":
            raise KeyError("a mistake")
        case "exit":
            raise SystemExit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "cancel":
            raise asyncio.CancelledError
        case "hang":
            await asyncio.Event().wait()
        case "deaf":
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
        case "nonsense":
            return "a lot"
        case "digits in a text":
            return {"right": "1"}
        case "name of recjax":
            return {"right": 1.0, "turns": -0.5}
        case "empty stop":
            await policy.complete(problem.prompt, stop=["a", ""])
        case "no stop":
            await policy.complete(problem.prompt, stop=None)
        case "infinite":
            return {"score": float("nan")}
        case "paid nonsense":
            policy.reward(float("nan"))
        case "long":
            await policy.complete(problem.prompt * 100)
        case "long in a group":
            async with asyncio.TaskGroup() as both:
                both.create_task(policy.complete(problem.prompt))
                both.create_task(policy.complete(problem.prompt * 100))
        case "long in a framework":
            try:
                await policy.complete(problem.prompt * 100)
            except Exception as error:
                raise RuntimeError("the framework failed") from error
        case "grid":
            await policy.complete(np.array([[1, 2]]))
        case "unprintable":
            raise Unprintable
        case "odd object":
            return Odd()
        case "on and on":
            while True:
                await policy.complete(problem.prompt)
    return 0.5 if reply else None


class Unprintable(Exception):
    """An error that has no text."""

    def __str__(self):
        raise RuntimeError("no text")


class Odd(float):
    """A return value that can be neither read nor printed."""

    def __repr__(self):
        raise RuntimeError("no repr")

    def __float__(self):
        raise RuntimeError("no number")


async def asks_at_length(problem: Problem, policy: AgentPolicy) -> float:
    """A short reply, and a long one that its end may find in the engine, as the problem's column `do` says."""

    def ask_long() -> Coroutine:
        return policy.complete(problem.prompt, max_tokens=80)

    async def break_soon() -> None:
        await policy.complete(problem.prompt, max_tokens=2)
        raise KeyError("a mistake")

    match problem.columns["do"]:
        case "leaves":
            background.append(asyncio.create_task(ask_long()))
        case "breaks":
            await asyncio.gather(ask_long(), break_soon())
    await policy.complete(problem.prompt, max_tokens=2)
    match problem.columns["do"]:
        case "plays":
            await ask_long()
        case "gives up":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ask_long(), 0.02)
            await asyncio.Event().wait()
        case "overruns":
            # Its clock stands still while it waits for the policy, so its time is ended from outside.
            asyncio.get_running_loop().call_later(0.02, policy.seats.timeout.reschedule, 0)
            await ask_long()
    return 0.5


background: list[asyncio.Task] = []
LOCK, SEMAPHORE, CLIENT = asyncio.Lock(), asyncio.Semaphore(2), httpx.AsyncClient(timeout=60)


async def status_of(url: str) -> int:
    """What a server says, as a judge would, by way of what this module holds."""
    async with SEMAPHORE, LOCK:
        await asyncio.sleep(0.001)
    return (await CLIENT.get(url)).status_code


async def of_a_module(problem: Problem, policy: AgentPolicy) -> None:
    """Two turns, and between them something of the module's."""
    await policy.complete("1+2=")
    assert await status_of(problem.prompt) == 200
    await policy.complete("1+2=")


async def of_a_module_too(prompts, completions, answers):
    """A reward by the same means."""
    return list(await asyncio.gather(*map(status_of, prompts)))


@contextlib.contextmanager
def answering():
    """The address of a server that keeps its connections."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        """Says nothing."""


async def waits_for_others(problem: Problem, policy: AgentPolicy) -> float:
    """One agent has a tool that ends only when all others have had four turns."""
    if problem.columns["do"] == "slow":
        await policy.complete(problem.prompt)
        while events.count("done") < 5:
            await asyncio.sleep(0.001)
        await policy.complete(problem.prompt)
        return 1.0
    for _ in range(4):
        await policy.complete(problem.prompt)
    events.append("done")
    return 0.0


def not_async(problem: Problem, policy: AgentPolicy) -> float:
    """No coroutine function."""
    return 1.0


async def of_one(problem: Problem) -> float:
    """Does not take a policy."""
    return 1.0


class Countdown:
    """An environment: tells how many steps are left; a reply's length is its reward."""

    def __init__(self, problem: Problem):
        self.left = len(problem.prompt)

    def reset(self, *, seed=None, options=None):
        self.left = 3
        return "9", {"seed": seed}

    def step(self, action):
        self.left -= 1
        return str(self.left), float(len(action)), self.left == 0, False, {}


class Chatty:
    """An environment of coroutines whose observations the problem's column `do` chooses."""

    def __init__(self, problem: Problem):
        self.does = problem.columns["do"]

    async def reset(self, *, seed=None, options=None):
        await asyncio.sleep(0)
        return None, {}

    async def step(self, action):
        await asyncio.sleep(0)
        match self.does:
            case "number":
                return 3, 0.0, False, False, {}
            case "four":
                return "3", 0.0, False, {}
        told = [{"role": "tool", "content": "so"}, {"role": "user", "content": [{"type": "text", "text": "on"}]}]
        return told, 0.5, False, False, {}


class Unseeded:
    """An environment whose reset takes no seed."""

    def __init__(self, problem: Problem):
        pass

    def reset(self):
        return "", {}


opened: list[str] = []
closed: list[str] = []


class Closing(Countdown):
    """A countdown with something to close, which goes wrong as the problem's column `do` says."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.does = problem.columns["do"]
        opened.append(self.does)

    def reset(self, *, seed=None, options=None):
        if self.does == "raise at first":
            raise KeyError("a mistake")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self.does == "raise":
            raise KeyError("a mistake")
        told, *others = super().step(action)
        return told * 100 if self.does == "long" else told, *others

    def close(self):
        closed.append(self.does)
        if self.does == "break at the end":
            raise KeyError("a mistake")
        return asyncio.sleep(0) if self.does == "end later" else None


def rule(prompt: str, generator) -> str:
    """A script that answers with a random digit."""
    return str(generator.randrange(10))


async def duel(problem: Problem, policy: Seats) -> dict[str, float]:
    """A zero-sum game of two seats, which a script watches; the column `do` says what goes wrong."""
    what = problem.columns.get("do")
    first = await policy.seat("first").complete(problem.prompt)
    if what == "alone" or (what == "sometimes" and first.tokens.sum() % 2):
        return {"first": 1.0, "second": -1.0}
    second = await policy.seat("second").complete(problem.prompt + first.raw)
    drawn = await policy.seat("rule").complete("1+1=")
    match what:
        case "no seat":
            await policy.seat("third").complete("1")
        case "policy":
            await policy.complete("1")
        case "one number":
            return 1.0
        case "one seat":
            return {"second": 1.0}
        case "a fourth seat":
            return {"first": 1.0, "second": -1.0, "fourth": 0.0}
    policy.seat("second").reward(0.25)
    won = 1.0 if (int(drawn.text) + int(first.tokens.sum() + second.tokens.sum())) % 2 else -0.5
    return {"first": {"won": won}, "second": -won}
