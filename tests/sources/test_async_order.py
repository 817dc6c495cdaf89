"""Asynchronous runs without their processes: what is drawn and trained on when, and what is refused."""

import contextlib
import itertools
import json
import random
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest

from recjax.config import RegimeConfig
from recjax.experience.group import token_staleness
from recjax.experience.queue import Queue, settings_of, take
from recjax.experience.replay import Entry
from recjax.rollout.requests import Weights
from recjax.runs.prepare import prepare
from recjax.sources import generators
from recjax.sources.generator import open_generator
from recjax.sources.generators import Generators
from recjax.sources.policy import PolicySource
from recjax.training import loop
from tests import commands
from tests.closeness import assert_same_logprobs
from tests.experience.groups import make_group
from tests.marks import campaign_except, slow_except
from tests.rollout.across_versions import logprobs_across
from tests.training.counting import CountingLearner, killed, prepared_batch
from tests.training.simulated_run import batch_of, simulated, started
from tests.training.tiny_run import train, without_times

ASYNC = ["regime.mode=async", "regime.max_staleness=2"]
SUMS = 'arithmetic: {problems: ["1..9 + 1..9"], template: "{a}{op}{b}="}'
MIXTURE = ["task.arithmetic=null", "task.reward=null", f"task.mixture.sums={{{SUMS}, weight: 3}}"]
MIXTURE += [f"task.mixture.more={{{SUMS.replace('1..9', '2..8')}}}"]


class InAnyOrder(Generators):
    """Without processes: batches of groups without tokens, which arrive in an order of its own."""

    def __init__(self, regime, seed):
        super().__init__(regime, contextlib.nullcontext)
        self._random, self.version, self.issued = random.Random(seed), 0, []

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def offer_weights(self, weights, version):
        self.version, self.weights = version, weights()

    def issue(self, number, rates=None):
        self.in_flight[number] = self.version
        assert len(self.in_flight) <= generators.BATCHES_PER_GENERATOR * self._regime.generators
        self.issued.append(number)

    def receive(self, wait):
        chosen = [number for number in self.in_flight if self._random.random() < 0.3]
        if wait and not chosen:
            chosen = self._random.sample(list(self.in_flight), min(1, len(self.in_flight)))
        self._random.shuffle(chosen)
        return [(number, batch_of(number, self.in_flight.pop(number), self._random)) for number in chosen]


def trained(config, seed):
    """Staleness of the groups of each step, how often each group was trained on, and what the last step logged."""
    apart, stale, uses, log = InAnyOrder(config.regime, seed), [], Counter(), []
    for step, groups, logged, _ in simulated(config, apart):
        log.append(logged)
        assert len(groups) == config.rollout.prompts_per_step
        stale.append([step - 1 - group.completions[0].policy_version for group in groups])
        uses.update(group.id for group in groups)
    assert apart.issued == list(range(1, len(apart.issued) + 1))
    return stale, uses, log[-1]


@pytest.mark.parametrize(
    "case",
    campaign_except(
        itertools.product([0, 1, 6], [1, 4], [1, 3], [1, 4]), (0, 4, 3, 1), (1, 4, 1, 1), (6, 1, 3, 1), (6, 4, 1, 4)
    ),
    ids=str,
)
def test_batches_in_any_order_keep_the_staleness_bound(tiny, case):
    bound, count, interval, updates = case
    bound = bound + interval * updates - 1
    regime = [f"regime.max_staleness={bound}", f"regime.generators={count}", f"regime.sync_interval={interval}"]
    steps = [f"training.updates_per_batch={updates}", f"training.steps={25 * updates}"]
    config = tiny("run", "regime.mode=async", *regime, *steps)
    for seed in range(3):
        stale, uses, logged = trained(config, seed)
        assert max(map(max, stale)) + updates - 1 <= bound and min(map(min, stale)) >= 0
        assert uses == Counter(f"{batch:06d}/{group:05d}" for batch in range(1, 26) for group in range(4))
        assert logged["experience/left_out/stale"] == 0 and logged["generators/in_flight"] == 0


@pytest.mark.parametrize(
    "options",
    [
        "experience.late={shortest: 0, longest: 4}",
        "experience.late={shortest: 0, longest: 4, deadline: 2}",
        "experience.replay={draw_every: 2, max_reuse: 3}",
        "experience.replay={draw_every: 2, max_reuse: 2, keep_no_signal: true, max_staleness: 2}",
    ],
)
@pytest.mark.parametrize("bound", slow_except([1, 4], 1))
def test_the_staleness_bound_holds_with_late_rewards_and_replay(tiny, options, bound):
    regime = [f"regime.max_staleness={bound}", "regime.generators=2"]
    config = tiny("run", "regime.mode=async", *regime, options, "training.steps=25")
    limits = settings_of(config).limits
    for seed in range(3):
        stale, uses, _ = trained(config, seed)
        assert max(map(max, stale)) <= limits.max_staleness <= bound
        assert max(uses.values()) <= limits.max_reuse


@pytest.mark.parametrize("stop", [1, 7])
def test_a_resumed_run_trains_once_on_batches_in_flight(tiny, stop):
    config = tiny("run", *ASYNC, "regime.generators=2", "training.steps=25")
    uses = Counter()
    setup, run, state = started(config, lambda *parts: PolicySource(*parts, InAnyOrder(config.regime, 0)))
    for step in range(1, 26):
        state = loop.next_groups(run, state, step)
        uses.update(group.id for group in state.groups)
        state = state._replace(groups=())
        if step == stop:
            state = state._replace(source=json.loads(json.dumps(run.source.state())))
            assert state.source["in_flight"]
            run = run._replace(source=PolicySource(setup, run.learner, InAnyOrder(config.regime, 1)))
            before = run.source.sampler.issued
            with run.source:
                run.source.restore(state)
                assert before == state.source["in_flight"]
    assert uses == Counter(f"{batch:06d}/{group:05d}" for batch in range(1, 26) for group in range(4))


class InOrder(InAnyOrder):
    """Without processes: batches of the counting learner, which arrive in order when a step waits for them."""

    def __init__(self, sampler):
        super().__init__(sampler.config.regime, 0)
        self._sampler, self._sampled = sampler, {}

    def issue(self, number, rates=None):
        super().issue(number)
        self._sampled[number] = prepared_batch(self._sampler, self.weights, self.version, number)

    def receive(self, wait):
        number = min(self.in_flight, default=None) if wait else None
        if number is None:
            return []
        self.in_flight.pop(number)
        groups, grades = self._sampled.pop(number)
        return [(number, (groups, grades.result()))]


BOUNDS = [*(pytest.param(bound, [], marks=pytest.mark.slow) for bound in (3, 11)), (3, MIXTURE)]


@pytest.mark.parametrize(("bound", "task"), BOUNDS, ids=["3", "11", "mixture"])
def test_a_run_killed_between_updates_resumes_with_its_batch(tiny, bound, task):
    options = ["training.updates_per_batch=2", "training.minibatches=2", "training.steps=12", *task]
    options += ["regime.mode=async", f"regime.max_staleness={bound}"]

    def rows(name, learner):
        feed = {
            "learner": learner,
            "sources": lambda setup, learner: PolicySource(setup, learner, InOrder(setup.sampler)),
        }
        return without_times(train(tiny(name, *options), **feed))

    straight = rows("straight", CountingLearner())
    assert [row["staleness"] for row in straight[1:5]] == [0, 1, 2, 3]
    for at in (
        6,
        5,
    ):  # steps 6 and 8, after the checkpoints of steps 3 and 6, which are in the middle of batches 1 and 2
        with pytest.raises(KeyboardInterrupt):
            rows("stopped", killed(at=at))
    resumed = rows("stopped", CountingLearner())
    # Without batches ahead the run is the same; batches that were in flight are sampled with other weights.
    same = 13 if bound == 3 else 5
    assert resumed[:same] == straight[:same] and len(resumed) == 13
    assert [max(map(int, row["staleness_rows"])) <= bound for row in resumed[1:]] == [True] * 12


def test_replay_draws_as_seldom_as_it_says(tiny):
    replay = "experience.replay={draw_every: 3, max_reuse: 20, keep_no_signal: true}"
    config = tiny("run", "regime.mode=async", "regime.max_staleness=6", replay, "training.steps=25")
    drawn = trained(config, 0)[2]["experience/drawn_batches"]
    # One every third step, and those that may be drawn six steps ahead.
    assert 25 // 3 <= drawn <= 25 // 3 + 1 + 6 // 3


@pytest.mark.slow
def test_newer_weights_sample_the_rest_of_a_batch(tiny):
    options = ["regime.swap_within=true", "rollout.max_completion_tokens=40", "rollout.prompts_per_step=2"]
    config = tiny("run", *ASYNC, *options)
    run, params = prepare(config)
    policy = run.policy._replace(stop_ids=())
    weights = {3: params, 5: jax.tree.map(lambda x: 1.5 * x, params), 9: jax.tree.map(lambda x: 0.7 * x, params)}
    come = iter([Weights(weights[version], version) for version in (3, 5, 9, 5)])
    with open_generator(config, policy, run.train, run.grading.reward, {}) as sample:
        groups, grades = sample(weights[3], 3, 1, lambda: next(come))
    completions = [one for group in groups for one in group.completions]
    assert len(grades) == len(completions) == 8
    for group in groups:
        for one in group.completions:
            # The first token and a round of sixteen, another round, and what is left.
            assert one.version_runs == ((3, 17), (5, 16), (9, 7)) and one.policy_version == 3
            versions = np.repeat(*np.array(one.version_runs).T)
            ((prompt, tokens, _, logprobs, _),) = one.rows
            found = logprobs_across(policy.decoder, weights, prompt, tokens, versions)
            assert_same_logprobs(logprobs, found)
            alone = logprobs_across(policy.decoder, weights, prompt, tokens, np.full(40, 3))
            assert np.abs(alone - found)[17:].max() > 0.01
    assert token_staleness(groups, 11) == (7 * 17 + 5 * 16 + 1 * 7) / 40


@pytest.mark.slow
def test_agents_continue_their_turns_with_newer_weights(tiny):
    options = ["regime.swap_within=true", "rollout.max_completion_tokens=20", "rollout.max_context_tokens=120"]
    agent = ["task.agent=tests.agents.some_agents:several_turns", "rollout.prompts_per_step=2"]
    config = tiny("run", *ASYNC, *options, *agent)
    run, params = prepare(config)
    policy = run.policy._replace(stop_ids=())
    weights = {3: params, 5: jax.tree.map(lambda x: 1.5 * x, params), 9: jax.tree.map(lambda x: 0.7 * x, params)}
    come = (Weights(weights[version], version) for version in itertools.chain([3, 5], itertools.repeat(9)))
    with open_generator(config, policy, run.train, run.grading.reward, {}) as sample:
        groups, grades = sample(weights[3], 3, 1, lambda: next(come))
    completions = [one for group in groups for one in group.completions]
    assert len(grades) == len(completions) == 8 and all(grade.reward is not None for grade in grades)
    for one in completions:
        assert {version for version, _ in one.version_runs} == {3, 5, 9} and one.policy_version == 3
        versions = np.split(np.repeat(*np.array(one.version_runs).T), [int(one.rows[0].mask.sum())])
        assert len(one.rows) == 2 and [len(each) for each in versions] == [row.mask.sum() for row in one.rows]
        start = [0, 0]
        for turn in one.turns:
            prompt, tokens, mask, logprobs, _ = one.rows[turn.row]
            (sampled,) = np.nonzero(mask[: turn.end])
            sampled = sampled[start[turn.row] :]
            before = np.concatenate([prompt, tokens[: sampled[0]]])
            of_turn = versions[turn.row][start[turn.row] :][: len(sampled)]
            found = logprobs_across(policy.decoder, weights, before, tokens[sampled], of_turn)
            assert_same_logprobs(logprobs[sampled], found)
            start[turn.row] += len(sampled)


def test_groups_that_are_too_stale_are_counted_in_tokens(tiny):
    config = tiny("run", *ASYNC)
    old, new = make_group(1, version=0), make_group(2, version=4)
    queue = Queue(ready=(Entry(old, 1, 0), Entry(new, 1, 0)))
    queue, groups = take(queue, 1, 5, 0, settings_of(config))
    assert groups == [new] and queue.counts["stale"] == 1
    assert queue.counts["stale_tokens"] == sum(len(one.rows[0].tokens) for one in old.completions) > 0


def test_without_ray_an_asynchronous_run_is_refused(tiny, monkeypatch):
    monkeypatch.setattr(generators.importlib.util, "find_spec", lambda name: None)
    generators.require_ray(tiny("run"))
    generators.require_ray(tiny("run", *ASYNC, "rollout.engine=http://127.0.0.1:9"))
    with pytest.raises(ValueError, match=r"pip install -e \"\.\[async\]\""):
        generators.require_ray(tiny("run", *ASYNC))


@pytest.mark.slow
def test_a_synchronous_run_imports_neither_ray_nor_torch(tiny):
    config = tiny("run", "training.steps=1", "experience.replay.max_reuse=2", "evaluation.every=0")
    program = (
        "import sys; from recjax.config import load_config; from tests.training.tiny_run import train;"
        "rows = train(load_config(sys.argv[1], sys.argv[2:]));"
        "sys.exit(len(rows) != 2 or bool({'ray', 'torch'} & {*sys.modules}))"
    )
    overrides = [f"output={config.output}", "training.steps=1", "experience.replay.max_reuse=2", "evaluation.every=0"]
    arguments = [str(Path(config.output).parent / "tiny.yaml"), *overrides]
    assert commands.run(["-c", program, *arguments]).returncode == 0


def test_an_address_where_nobody_answers_is_refused(monkeypatch, prompt_generators):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match="regime.address = 'localhost:1': no Ray cluster answers there"):
        Generators(
            RegimeConfig(mode="async", max_staleness=0, address="localhost:1"), contextlib.nullcontext
        ).__enter__()
