"""Mixtures of tasks, curricula and kept problems: what a batch has, who grades it, and what is refused."""

import contextlib
import json
from types import SimpleNamespace

import numpy as np
import pytest

from recjax.config import make_config
from recjax.experience import queue
from recjax.experience.group import Completion, Grade, Group, Row
from recjax.hub.policy import Policy
from recjax.rewards.custom import Answered, custom_parts
from recjax.rewards.pool import Grading
from recjax.rewards.reward import MixedReward, Reward, load_reward
from recjax.runs import prepare
from recjax.runs.prepare import kept_prompts
from recjax.tasks.loading import load_task
from recjax.tasks.problems import Problem, problem_key
from recjax.tasks.prompts import Prompts, batch_indices, batch_prompts, curriculum_chances
from recjax.training import evaluation
from recjax.training.evaluation import AnsweredPart

SUMS = {"arithmetic": {"problems": ["1..9 + 1..9"]}}
PRODUCTS = {"arithmetic": {"problems": ["1..5 * 1..9"]}, "reward": "recjax.tasks.rewards:last_number_match"}
BASE = {"output": "unused", "model": {"path": "unused"}, "rollout": {"prompts_per_step": 8, "max_completion_tokens": 4}}
MIXTURE = {"mixture": {"sums": {**SUMS, "weight": 5}, "products": {**PRODUCTS, "weight": 3}}}


def config(task=MIXTURE, *overrides):
    return make_config({**BASE, "task": json.loads(json.dumps(task)), "evaluation": {"problems": 5}}, overrides)


def prompts(**sizes):
    """One-token prompts of tasks; a problem's prompt is its number within its task."""
    problems = [Problem(str(number), "", task=task) for task, size in sorted(sizes.items()) for number in range(size)]
    tokens = np.arange(len(problems), dtype=np.int32)[:, None]
    keys = [problem_key(problem.prompt, problem.answer) for problem in problems]
    return Prompts(tokens, np.ones(tokens.shape, bool), [problem.prompt for problem in problems], problems, keys)


def drawn(batches, train, **options):
    mixed = config()
    taken = [batch_prompts(train, mixed, 7, batch, **options).problems for batch in range(1, batches + 1)]
    return [[(problem.task, int(problem.prompt)) for problem in problems] for problems in taken]


def test_batches_have_each_tasks_expected_number_on_average():
    batches = drawn(400, prompts(products=20, sums=30))
    counts = np.array([sum(task == "sums" for task, _ in batch) for batch in batches])
    assert {*counts.tolist()} == {4, 5} and all(len(batch) == 7 for batch in batches)  # 5/8 of 7 is 4.375
    assert abs(counts.mean() - 4.375) < 0.075  # three standard errors
    # Every task has epochs of its own, over all batches.
    for task, size in (("products", 20), ("sums", 30)):
        numbers = [number for batch in batches for name, number in batch if name == task]
        for start in range(0, len(numbers) - size, size):
            assert sorted(numbers[start : start + size]) == list(range(size))
    # Tasks have no order within a batch, and each batch depends only on the seed and its number.
    assert len({tuple(task for task, _ in batch) for batch in batches}) > 10
    later = batch_prompts(prompts(products=20, sums=30), config(), 7, 399).problems
    assert [(problem.task, int(problem.prompt)) for problem in later] == batches[398]


def test_a_mixture_of_one_draws_like_its_task():
    train, alone = prompts(sums=11), config({"mixture": {"sums": SUMS}})
    for batch in (1, 2, 9):
        mixed = batch_prompts(train, alone, 4, batch).tokens[:, 0]
        np.testing.assert_array_equal(mixed, batch_indices(11, 4, batch, seed=0))


def test_a_curriculum_draws_learnable_and_uniform_problems():
    np.testing.assert_allclose(curriculum_chances(np.array([0, 0.5, 0.25, 1]), 0.2), [0.05, 0.5071, 0.3929, 0.05], 1e-3)
    np.testing.assert_allclose(curriculum_chances(np.zeros(4), 0.0), np.full(4, 0.25))
    train = prompts(products=20, sums=30)
    rates = {key: 1.0 for place, key in enumerate(train.keys) if place % 20 != 3}
    task = {**MIXTURE, "curriculum": {"uniform": 0.0}}
    batch = batch_prompts(train, config(task), 8, 1, rates).problems
    assert {int(problem.prompt) for problem in batch} > {3} and len(batch) == 8
    assert len({(problem.task, problem.prompt) for problem in batch}) == 8  # no problem twice in a batch
    without_reward = {key: None for place, key in enumerate(train.keys) if place % 20 == 3}
    problems = batch_prompts(train, config(task), 8, 1, dict.fromkeys(train.keys, 0.5) | without_reward).problems
    assert all(int(problem.prompt) % 20 != 3 for problem in problems)


KEY = problem_key("1+1", "2")


def delivered(held, number, right, settings, rewards=(1.0,) * 4):
    """The queue after a round in which a group of four arrives, whose first `right` completions are right."""
    grades = [Grade(reward, None, place < right) for place, reward in enumerate(rewards)]
    row = Row(np.zeros(1, np.int32), np.zeros(1, np.int32), np.ones(1, bool), None)
    completions = tuple(Completion(f"{number}/{place}", "policy", "", (row,), None, 0, False) for place in range(4))
    group = Group(str(number), np.zeros(1, np.int32), completions, "1+1", "2")
    arrival = queue.Arrival([group], grades, number)
    held, _ = queue.wait_for_grades(queue.put(held._replace(round=number), arrival, 0, settings), all_of_them=True)
    held = queue.deliver(held, number, settings)
    groups, plain = queue.to_plain(held)
    assert queue.from_plain(groups, json.loads(json.dumps(plain))).rates == held.rates
    return held


def test_the_queue_follows_all_groups_pass_rates():
    settings, held = queue.settings_of(config({**SUMS, "curriculum": {"newest": 0.25}}, "experience.refill={}")), None
    for number, right, expected in ((1, 4, 1.0), (2, 2, 0.875), (3, 0, 0.65625)):
        rewards = [float(place < right) for place in range(4)]
        held = delivered(held or queue.Queue(), number, right, settings, rewards)
        assert held.rates == {KEY: expected}
    assert len(held.ready) == 1  # the group with a signal


def test_problems_without_rewards_have_no_pass_rate():
    settings, held = queue.settings_of(config({**SUMS, "curriculum": {}})), queue.Queue()
    one_reward = (None, None, None, 1.0)
    for number, right, rewards, expected in (
        (1, 0, [None] * 4, None),
        (2, 4, one_reward, 1.0),
        (3, 0, one_reward, 0.5),
        (4, 0, [None] * 4, None),
    ):
        held = delivered(held, number, right, settings, rewards)
        assert held.rates == {KEY: expected}, number
    late = queue.settings_of(config({**SUMS, "curriculum": {}}, "experience.late={shortest: 2, longest: 2}"))
    late = late._replace(late=late.late.model_copy(update={"deadline": 1}))
    held = delivered(queue.Queue(), 1, 3, late)
    for number, expected in ((2, {KEY: None}), (3, {KEY: 0.75})):  # the deadline, and the rewards after it
        held = queue.deliver(held._replace(round=number), number, late)
        assert held.rates == expected


def test_no_mixture_problem_is_trained_and_held_out():
    fewer = {"arithmetic": {"problems": ["1..9 + 1..7"]}}  # other order, so that others are held out
    task = load_task(config({"mixture": {"a": {**SUMS, "weight": 0}, "b": PRODUCTS, "c": fewer}}))
    assert {problem.task for problem in task.train} == {"b", "c"} and [*task.reward.rewards] == ["a", "b", "c"]
    assert [problem.task for problem in task.evaluation] == ["a"] * 5 + ["b"] * 5 + ["c"] * 5
    held_out = {problem.prompt for problem in task.evaluation}
    assert held_out.isdisjoint(problem.prompt for problem in task.train)
    everything = load_task(config(), "all")
    assert not everything.train and len(everything.evaluation) == 81 + 45


@pytest.mark.parametrize(
    ("task", "overrides", "message"),
    [
        (MIXTURE, ["task.mixture.sums.wieght=2"], "task.mixture.sums = .*unknown key 'wieght'.*did you mean 'weight'"),
        (MIXTURE, ["task.mixture.sums.agent=a:b"], "agent is a key of all tasks of a mixture; set task.agent instead"),
        (MIXTURE, ["task.mixture.sums=3"], "takes a block with a task"),
        (MIXTURE, ["task.mixture.sums.math={}"], "sums: give exactly one of arithmetic.*found arithmetic and math"),
        (MIXTURE, ["task.mixture.sums.weight=0", "task.mixture.products.weight=0"], "no task has a weight above 0"),
        ({"mixture": {"a/b": SUMS}}, [], "the name 'a/b' of a task must consist of"),
        (MIXTURE, ["task.reward=a:b"], "task.reward = 'a:b': does not work with task.mixture"),
        (MIXTURE, ["task.mixture.sums.reward=foo"], "task.mixture.sums.reward = 'foo': takes module:function"),
        (MIXTURE, ["algorithm.preset=gdpo"], "weights differ between tasks of task.mixture"),
        (MIXTURE, ["task.keep={pass_rate: [0.9, 0.1]}"], r"takes \[lowest, highest\]"),
        (MIXTURE, ["task.keep={}", "experience.store=x.db"], "does not work with experience.store"),
        (MIXTURE, ["task.curriculum={}", "regime={mode: async, max_staleness: 9}"], "does not work with regime.mode"),
    ],
)
def test_settings_that_contradict_a_mixture_are_refused(task, overrides, message):
    with pytest.raises(ValueError, match=message):
        config(task, *overrides)


def test_ambiguous_metric_names_are_refused_before_weights_load():
    with pytest.raises(ValueError, match="task.mixture.length: a part of the reward .* has the same name"):
        load_task(config({"mixture": {"length": SUMS, "b": PRODUCTS}}))
    with pytest.raises(ValueError, match=r"the task few has 3 train problems, fewer than .* = 8, times its share 0.5"):
        load_task(
            config(
                {"mixture": {"few": {"arithmetic": {"problems": ["1..2 + 1..2"]}}, "b": PRODUCTS}},
                "evaluation.problems=1",
            )
        )


def test_each_task_has_its_reward():
    rewards = MixedReward({"a": load_reward("recjax.tasks.rewards:number_match"), "b": load_reward("math")})
    mixed = config({"mixture": {"a": SUMS, "b": {"math": {}}}}, "grading.seconds=20")
    rows = [("3", "3", "a"), (r"\boxed{4}", "4", "b"), ("4", "3", "a")]
    with Grading(mixed, rewards) as grading:
        scores = grading.submit([Answered("p", text, answer, {}, 1, task=task) for text, answer, task in rows]).result()
        assert grading.parsed([r"\boxed{4}"], task="b") == ["4"] and grading.parsed(["5 "], task="a") == ["5"]
        with pytest.raises(ValueError, match="belongs to the task ''; the mixture has a, b"):
            grading.submit([Answered("p", "3", "3", {}, 1)]).result()
    assert scores.rewards.tolist() == [1, 1, 0] and scores.accurate.tolist() == [True, True, False]
    np.testing.assert_array_equal(scores.parts["score"], [1, np.nan, 0])
    np.testing.assert_array_equal(scores.parts["accuracy"], [np.nan, 1, np.nan])


def raises(completions, **columns):
    return [1 / (len(text) - 1) for text in completions]


async def raises_in_messages(completions, **columns):
    return [1 / (len(one[0]["content"]) - 1) for one in completions]


def raises_after_another(completions, **columns):
    for text in completions:
        with contextlib.suppress(ValueError):
            int(text)
    return [1 / (len(text) - 1) for text in completions]


def reward_of(function):
    return Reward(f"{__name__}:{function.__name__}", function, False, {}, answer="label")


ROWS = [
    Answered("first", "abc", "abc", {"level": 2}, 1, id="000001/00000"),
    Answered("second", "x", "y", {"level": 3}, 1, id="000001/00001", chat=[{"role": "user", "content": "x"}]),
]


@pytest.mark.parametrize(
    ("function", "rows"), [(raises, ROWS), (raises_in_messages, ROWS[1:]), (raises_after_another, ROWS)]
)
def test_a_raising_reward_names_the_completion(function, rows):
    with pytest.raises(
        ValueError, match="while it graded completion 'x' .*, id '000001/00001', of the prompt 'second'"
    ):
        custom_parts(reward_of(function), rows)


def test_pass_rates_are_measured_once_and_continued(monkeypatch, tmp_path):
    """Problems 0 to 8 are solved 0 to 4 times of 4; parts have 4 problems."""
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path))
    train, sampled, stop = prompts(**{"": 9}), [], [True]

    def answered(config, policy, params, prompts, grading, step, agents, done):
        for start in (start for start in range(0, 9, 4) if start not in done):
            if start == 8 and stop:
                raise KeyboardInterrupt
            sampled.append(start)
            grades = [[place % 5 > each for each in range(4)] for place in range(start, min(start + 4, 9))]
            groups = [
                SimpleNamespace(
                    completions=[SimpleNamespace(known_grade=SimpleNamespace(accurate=one)) for one in group]
                )
                for group in grades
            ]
            yield AnsweredPart(start, prompts, groups)

    monkeypatch.setattr(evaluation, "answered", answered)
    monkeypatch.setattr(prepare, "fingerprint", lambda params: "weights")
    task = {**SUMS, "keep": {"pass_rate": [0.25, 0.75], "samples": 4}}
    policy = Policy(**dict.fromkeys(Policy._fields))._replace(decoder=SimpleNamespace(dtype="float32"))

    def kept(*overrides):
        settings = config(task, "rollout.prompts_per_step=4", *overrides)
        return kept_prompts(settings, policy, {}, train, load_reward("recjax.tasks.rewards:number_match"))

    with pytest.raises(KeyboardInterrupt):
        kept()
    assert sampled == [0, 4]
    (path,) = (tmp_path / "pass_rates").iterdir()
    path.write_bytes(path.read_bytes() + b'\n{"first": 8, "acc')  # a kill left half a line
    stop.clear()
    assert kept().texts == ["1", "2", "3", "6", "7", "8"] and sampled == [0, 4, 8]
    assert kept("task.keep.pass_rate=[0.5, 1.0]").texts == ["2", "3", "4", "7", "8"] and sampled == [0, 4, 8]
    with pytest.raises(ValueError, match="the task has 2 train problems.*widen task.keep.pass_rate"):
        kept("task.keep.pass_rate=[0.0, 0.0]")
    kept("rollout.temperature=0.5")
    assert sampled == [0, 4, 8, 0, 4, 8]  # other sampling, other rates


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"arithmetic": {"problems": ["1..9 % 1..9"]}}, r"task.mixture.b.arithmetic.problems: '1..9 % 1..9'"),
        ({"arithmetic": {}, "reward": "math:absent"}, "task.mixture.b.reward = 'math:absent'"),
        ({"file": {"train": "none.jsonl"}}, "task.mixture.b.file"),
        ({"arithmetic": {}, "reward_seconds": 3.0}, "task.mixture.b.reward_seconds = 3.0"),
    ],
)
def test_a_tasks_errors_name_its_mixture_keys(task, message):
    with pytest.raises(ValueError, match=message):
        load_task(config({"mixture": {"a": SUMS, "b": task}}))
