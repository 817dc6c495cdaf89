"""The engine for coroutines: the same completions as in a batch, whoever comes, goes or fails meanwhile."""

import asyncio
import functools

import jax
import numpy as np
import pytest

from recjax.models.decoder import Decoder
from recjax.models.decoder_config import DecoderConfig
from recjax.models.sampling import Sampling
from recjax.rollout.engine import Engine
from recjax.rollout.live import LiveEngine
from recjax.rollout.requests import Request
from tests.closeness import assert_same_logprobs
from tests.tiny import params_of

CONFIG = DecoderConfig(23, 16, 32, 1, 2, 1, 8)


@functools.cache
def initial():
    """The weights of version 3."""
    return params_of(CONFIG, 1)


def engine():
    made = Engine(Decoder(CONFIG), (7,), slots=4, prefix_time=8)
    made.replace_weights(initial(), version=3)
    return made


def request(number, limit=6):
    prefix = np.arange(1, 3 + number % 4, dtype=np.int32)
    return Request(prefix, np.asarray(jax.random.key_data(jax.random.key(number))), limit, Sampling())


def at_once(numbers, limit=6):
    """Completions of an engine that nobody else uses."""
    own = engine()
    tickets, finished = own.admit([request(number, limit) for number in numbers]), own.drain()
    return [finished[ticket] for ticket in tickets]


def same(found, expected):
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert_same_logprobs(found.logprobs, expected.logprobs)


def test_who_waits_gets_its_own_completion():
    async def main():
        async with LiveEngine(engine()) as live:
            first = [asyncio.create_task(live.sample(request(number))) for number in range(5)]
            early = await first[2]
            more = [asyncio.create_task(live.sample(request(number))) for number in range(5, 8)]
            return early, [await task for task in [*first, *more]]

    early, found = asyncio.run(main())
    assert early is found[2] and {version for one in found for version in one.versions} == {3}
    for one, expected in zip(found, at_once(range(8)), strict=True):
        same(one, expected)


def test_cancelling_one_leaves_the_others_as_they_are():
    async def main():
        async with LiveEngine(engine()) as live:
            tasks = [asyncio.create_task(live.sample(request(number, limit=20))) for number in range(4)]
            await asyncio.sleep(0)
            tasks[1].cancel()  # before its round
            kept = await tasks[0]
            late = asyncio.create_task(live.sample(request(5, limit=20)))
            await asyncio.sleep(0)
            later = asyncio.create_task(live.sample(request(6, limit=20)))
            while live._arrived:  # until a round has begun with it
                await asyncio.sleep(0)
            late.cancel()
            others = kept, await tasks[2], await tasks[3], await later
            while live._serving:  # until the engine is done with whom nobody awaits
                await asyncio.sleep(0)
            assert live.error is None and tasks[1].cancelled() and late.cancelled()
            return others

    for one, expected in zip(asyncio.run(main()), at_once((0, 2, 3, 6), limit=20), strict=True):
        same(one, expected)


def test_a_refused_request_raises_where_it_was_made():
    async def main():
        async with LiveEngine(engine()) as live:
            good, bad = (asyncio.create_task(live.sample(request(0, limit))) for limit in (6, 0))
            with pytest.raises(ValueError, match="limit = 0"):
                await bad
            return await good

    same(asyncio.run(main()), *at_once([0]))


def test_the_engines_error_reaches_waiting_and_later_requests(monkeypatch):
    async def main():
        made = engine()
        monkeypatch.setattr(made, "step", lambda: 1 / 0)
        async with LiveEngine(made) as live:
            tasks = [asyncio.create_task(live.sample(request(number))) for number in range(3)]
            for task in tasks:
                with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                    await task
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                await live.sample(request(9))

    asyncio.run(asyncio.wait_for(main(), 60))


def test_new_weights_come_between_two_rounds():
    async def main():
        async with LiveEngine(engine()) as live:
            await live.sample(request(0))
            await live.replace_weights(jax.tree.map(lambda x: x * 1.5, initial()), 4)
            return await live.sample(request(0))

    found = asyncio.run(main())
    assert {*found.versions} == {4}
    assert not np.allclose(found.logprobs[:1], at_once([0])[0].logprobs[:1])


def test_a_follower_sees_each_round_and_the_completion():
    async def main():
        async with LiveEngine(engine()) as live:
            other = asyncio.create_task(live.sample(request(1, limit=40)))
            seen = [sampled async for sampled in live.follow(request(2, limit=40))]
            return seen, await other

    seen, other = asyncio.run(main())
    (expected, beside) = at_once((2, 1), limit=40)
    same(seen[-1], expected)
    same(other, beside)
    sizes = [len(sampled.tokens) for sampled in seen]
    assert sizes == sorted(sizes) and sizes[0] == 17 and len(sizes) > 1, "a first token, and rounds of 16"
    for sampled in seen[:-1]:
        np.testing.assert_array_equal(sampled.tokens, expected.tokens[: len(sampled.tokens)])
        assert sampled.truncated, "it has not ended"


def test_a_canceled_request_frees_its_slot_and_queue_place():
    async def main():
        made = Engine(Decoder(CONFIG), (), slots=2, prefix_time=8)
        made.replace_weights(initial(), version=3)
        async with LiveEngine(made) as live:
            tasks = [asyncio.create_task(live.sample(request(number, limit=10_000))) for number in range(4)]
            follower = live.follow(request(5, limit=4))
            while not made._slots.live.any():
                await asyncio.sleep(0.001)
            for task in tasks:
                task.cancel()
            found = [sampled async for sampled in follower]
            assert not made._slots.live.any() and not made._waiting(), "ten thousand tokens were not waited for"
            while live._serving:
                await asyncio.sleep(0)
            return found[-1]

    own = Engine(Decoder(CONFIG), (), slots=None, prefix_time=8)
    own.replace_weights(initial(), version=3)
    own.admit([request(5, limit=4)])
    (expected,) = own.drain().values()
    same(asyncio.run(main()), expected)


@pytest.mark.parametrize("passes", [2, 16])
def test_a_follower_who_stops_early_frees_its_slot(passes):
    async def main():
        made = engine()
        async with LiveEngine(made, passes) as live:
            follower = live.follow(request(2, limit=10_000))
            piece = await anext(follower)
            await follower.aclose()
            while live._serving:
                await asyncio.sleep(0)
            assert not made._slots.live.any() and live.error is None
            assert made._slots.table.counts.max() == len(piece.tokens)

    asyncio.run(main())
