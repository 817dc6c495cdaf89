"""Environments of the package verifiers, with a running server's policy as the agent; their rewards go to the server.

    pip install verifiers uv                                # in any environment of Python 3.11 or later
    python -m recjax.serve --model smollm2 --name smollm2   # in another terminal
    python experiments/live/verifiers_sessions.py http://127.0.0.1:8000 [ROLLOUTS]

A rollout is a session of the server: its id is in the address that the agent's client has, and so the server keeps the
rollout's turns as one trajectory. Half of the rollouts have one turn, and half have up to three, with a user who says
what is wrong. `uv` starts the package's own chat program, which is the agent's harness. Works with any model that has a
chat template.
"""

import asyncio
import os
import random
import sys
import uuid

import httpx
import verifiers.v1 as vf
from verifiers.v1.clients import EvalClientConfig
from verifiers.v1.configs.harness import HarnessConfig

TURNS = 3
TOKENS = 24  # of a reply


class Sum(vf.TaskData):
    """A question with a number as its answer."""

    answer: str


class Adding(vf.Task[Sum]):
    """A sum, rewarded for the right number in the last reply, and for few turns."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Whether the last reply has the number."""
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=-0.1)
    async def further_turns(self, trace: vf.Trace) -> float:
        """Turns after the first."""
        return trace.num_turns - 1.0


def tasks(count: int) -> list[Adding]:
    """So many sums, the same at each call."""
    numbers = random.Random(0)
    pairs = [(numbers.randint(1, 9), numbers.randint(1, 9)) for _ in range(count)]
    sums = [Sum(idx=place, prompt=f"What is {a} + {b}?", answer=str(a + b)) for place, (a, b) in enumerate(pairs)]
    return [Adding(data) for data in sums]


def agent(address: str, model: str, session: str) -> vf.Agent:
    """The policy as an agent whose turns are a session of the server."""
    return vf.make_agent(
        vf.AgentConfig(
            harness=HarnessConfig(id="null"),
            runtime=vf.SubprocessConfig(),
            model=model,
            client=EvalClientConfig(base_url=f"{address}/sessions/{session}/v1"),
            sampling=vf.SamplingConfig(temperature=1.0, max_tokens=TOKENS),
        )
    )


async def one_turn(player: vf.Agent, task: Adding) -> vf.Trace:
    """A rollout of one reply."""
    return await player.run(task)


async def several_turns(player: vf.Agent, task: Adding) -> vf.Trace:
    """A rollout with a user who answers, until the reply is right or there were enough."""
    async with player.interaction(task) as interaction:
        segment = await interaction.turn()
        for _ in range(TURNS - 1):
            if segment.terminated or task.data.answer in segment.last_reply:
                break
            segment = await interaction.turn("That is wrong. Try again.")
    return interaction.trace


async def rollout(client: httpx.AsyncClient, address: str, model: str, task: Adding) -> str:
    """Plays a task and sends its reward; returns the session, with what came of it."""
    session = f"verifiers-{uuid.uuid4().hex}"
    play = several_turns if task.data.idx % 2 else one_turn
    trace = await play(agent(address, model, session), task)
    if trace.has_error:
        raise RuntimeError(f"{session}: {trace.last_error}")
    parts = {name: reward.score for name, reward in trace.rewards.items()}
    body = {"reward": trace.reward, "reward_parts": parts, "comment": f"verifiers {trace.id}"}
    (await client.post(f"/sessions/{session}/reward", json=body)).raise_for_status()
    return f"{session}: {trace.num_turns} turns, reward {trace.reward:g}"


async def main(address: str, count: int) -> None:
    """Plays so many tasks at once."""
    async with httpx.AsyncClient(base_url=address, timeout=60) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        for line in await asyncio.gather(*(rollout(client, address, model, task) for task in tasks(count))):
            print(line)


if __name__ == "__main__":
    # uv is found beside this interpreter, whether or not its environment is activated.
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    asyncio.run(main(sys.argv[1].rstrip("/"), int(sys.argv[2]) if len(sys.argv) > 2 else 8))
