"""Grading: worker processes that hang, die and swell; parts and weights; rewards of the user's own."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from recjax.config import Config, GradingConfig, RolloutConfig, TaskConfig, TrainingConfig
from recjax.errors import UserError
from recjax.experience.group import Completion, Grade
from recjax.grading.graders import GRADERS, Grader
from recjax.rewards import custom as own_rewards
from recjax.rewards import reward as reward_module
from recjax.rewards.pool import FAILURES, Answered, Grading
from recjax.rewards.reward import Reward, load_reward
from recjax.rollout.collecting import Grades
from recjax.store.stored import as_trained
from tests.marks import slow, slow_except

CONFIG = Config.model_construct(
    grading=GradingConfig(seconds=2.5, max_characters=5_000), rollout=RolloutConfig(max_completion_tokens=10)
)

# Real graders import and parse, which on a busy machine takes its time.
PATIENT = CONFIG.model_copy(update={"grading": GradingConfig(seconds=20.0, max_characters=5_000)})


def submitted(grading, completions, answers=None, columns=None):
    count = len(completions)
    of_rows = zip(completions, answers or ["a"] * count, columns or [{}] * count, strict=True)
    return grading.submit(
        [
            Answered("p", completion, answer, more, number)
            for number, (completion, answer, more) in enumerate(of_rows, 1)
        ]
    )


def scores_of(reward, completions, config=CONFIG, **given):
    with Grading(config, reward) as grading:
        return submitted(grading, completions, **given).result(timeout=60)


def custom(function, **weights):
    return Reward(f"{__name__}:{function.__name__}", function, False, {"length": 0.0, **weights})


@pytest.fixture(scope="module")
def faulty():
    """An open grading of tests.rewards.faulty_graders."""
    patch = pytest.MonkeyPatch()
    patch.setitem(GRADERS, "faulty", Grader("tests.rewards.faulty_graders:grade", {"accuracy": 1.0}, "builtins:str"))
    with Grading(CONFIG, load_reward("faulty")) as grading:
        yield grading
    patch.undo()


def test_a_failure_costs_its_own_completion_and_is_counted(faulty):
    expected = {
        "a": "none",
        "sleep": "timeout",
        "spin": "timeout",
        "exit": "crash",
        "kill": "crash",
        "segfault": "crash",
        "memory": "error",
        "deep": "error",
        "raise": "error",
        "refuse": "error",
        "unsent": "error",
        "leave": "error",
        "print": "none",
        "x" * 5_001: "too_long",
        "b": "none",
    }
    said = [*expected, "a"]
    scores = submitted(faulty, said).result(timeout=120)
    assert [FAILURES[place] for place in scores.failures] == [*expected.values(), "none"]
    assert scores.rewards.tolist() == [text == "a" for text in said] == scores.accurate.tolist()
    assert submitted(faulty, ["a"] * 20).result(timeout=60).rewards.tolist() == [1] * 20, "the pool is whole again"


def test_workers_stay_from_batch_to_batch(faulty):
    # Whoever is first may take a whole batch, so two batches need not share a worker.
    seen = {pid for _ in range(5) for pid in submitted(faulty, ["pid"] * 8).result().rewards}
    assert len(seen) <= CONFIG.grading.workers and os.getpid() not in seen


def test_workers_see_columns_and_no_jax(faulty):
    assert "jax" in sys.modules, "this process has what a worker could take over"
    scores = submitted(faulty, ["modules", "column", "column"], columns=[{}, {"level": 3}, {"level": 4}]).result()
    assert scores.rewards.tolist() == [1, 1, 0]


def test_graders_and_workers_import_no_jax():
    modules = "recjax.runtime.workers, recjax.grading.graders"
    modules += ", recjax.grading.math_answers, recjax.grading.tool_calls"
    check = f"import sys, {modules}; assert not {{'jax', 'jaxlib', 'numpy'}} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def alive(group):
    """Whether any process of a group runs; one that has ended and is not yet reaped does not."""
    lines = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True).stdout.splitlines()
    return any(line.split()[0] == str(group) and not line.split()[1].startswith(("Z", "X")) for line in lines)


def gone_within(group, seconds):
    deadline = time.monotonic() + seconds
    while alive(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not alive(group)


def test_leaving_ends_hanging_processes_at_once(faulty):
    with pytest.raises(KeyboardInterrupt):
        with Grading(CONFIG, load_reward("faulty")) as grading:
            assert submitted(grading, ["a"]).result().rewards == [1]
            group = grading._workers._program.pid
            assert alive(group)
            submitted(grading, ["spin"] * 100)
            raise KeyboardInterrupt
    assert gone_within(group, 5)


@pytest.mark.slow
def test_a_killed_training_process_leaves_nothing_behind():
    program = (
        "from tests.rewards.test_grading import *\n"
        "GRADERS['faulty'] = Grader('tests.rewards.faulty_graders:grade', {'accuracy': 1.0}, '')\n"
        "with Grading(CONFIG, load_reward('faulty')) as grading:\n"
        "    submitted(grading, ['a']).result()\n"
        "    submitted(grading, ['spin'] * 100)\n"
        "    print(grading._workers._program.pid, flush=True)\n"
        "    time.sleep(1000)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    group = int(process.stdout.readline())
    assert alive(group)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert gone_within(group, 5)


def test_a_dying_grading_process_is_an_error(faulty):
    with Grading(CONFIG, load_reward("faulty")) as grading:
        assert submitted(grading, ["a"]).result().rewards == [1]
        os.killpg(grading._workers._program.pid, signal.SIGKILL)
        with pytest.raises(UserError, match="worker processes ended by themselves"):
            for _ in range(1000):  # a worker, whose group is its own, may answer until the system has ended it, too
                submitted(grading, ["a"]).result(timeout=30)


def test_real_answers_through_the_pool():
    said = [r"\boxed{\frac12}", r"\boxed{2}", r"\boxed{7^{7^{7^{7}}}}", "\\boxed{" + "9" * 9000 + "}"]
    scores = scores_of(load_reward("guru_math", {"length": 1.0}), said, answers=["0.5"] * 4)
    np.testing.assert_allclose(scores.rewards, [1.1, 0.2, 0.3, 0], rtol=1e-6)  # none of its length for a failure
    assert [FAILURES[place] for place in scores.failures] == ["none", "none", "none", "too_long"]


def test_the_reward_is_the_weighted_sum_of_its_parts():
    said = ["<think>a</think><answer>5</answer>", "<answer>5</answer>", "<think>a</think><answer>6</answer>", "6"]
    scores = scores_of(load_reward("gsm8k"), said, PATIENT, answers=["5"] * 4)
    np.testing.assert_allclose(scores.rewards, [1.1, 0.9, 0.1, -0.1], rtol=1e-6)
    assert scores.accurate.tolist() == [True, True, False, False]
    weighted = scores_of(load_reward("gsm8k", {"format": 0.5, "length": -1.0}), said, PATIENT, answers=["5"] * 4)
    np.testing.assert_allclose(weighted.rewards, [1.5 - 0.1, 0.5 - 0.2, 0.5 - 0.3, -0.5 - 0.4], rtol=1e-6)
    assert weighted.accurate.tolist() == scores.accurate.tolist()
    assert {name: values.tolist() for name, values in weighted.parts.items()} == {
        "accuracy": [1, 1, 0, 0],
        "format": [1, -1, 1, -1],
        "length": pytest.approx([0.1, 0.2, 0.3, 0.4]),
    }


def test_thoughts_that_the_prompt_opened_are_no_answer():
    said = [r"so \boxed{5}", r"so</think>\boxed{5}"]
    prompts = ["<|assistant|><think>\n", "<|assistant|>"]
    rows = [Answered(prompt, text, "5", {}, 1) for prompt in prompts for text in said]
    # An agent's last reply follows another prompt than its first.
    rows += [Answered(prompts[0], said[0], "5", {}, 1, opening) for opening in ("", "[THINK]")]
    with Grading(PATIENT, load_reward("math")) as grading:
        assert grading.submit(rows).result(timeout=60).rewards.tolist() == [0, 1, 1, 1, 1, 0]
        assert grading.parsed(said * 2, ["<think>"] * 2 + [""] * 2) == [None, "5", "5", "5"]
    with Grading(PATIENT, load_reward("recjax.tasks.rewards:number_match")) as grading:
        rows = [Answered(prompts[0], text, "5", {}, 1) for text in ("5", "so</think>5")]
        assert grading.submit(rows).result(timeout=60).rewards.tolist() == [0, 1]
        assert grading.parsed(["5", "so</think>5"], ["<think>"] * 2) == [None, "5"]


def test_a_prompts_tag_is_not_counted_as_the_completions():
    with Grading(PATIENT, load_reward("math")) as grading:
        rows = [Answered("<think>", "</think>" + " " * 4_983 + r"\boxed{5}", "5", {}, 1)]
        assert len(rows[0].completion) == 5_000 and grading.submit(rows).result(timeout=60).rewards == [1]


def test_weights_of_unknown_parts_are_refused_at_start():
    with pytest.raises(
        ValueError, match=r"task.reward_weights.fromat: the reward gsm8k has the parts accuracy, format, length"
    ):
        load_reward("gsm8k", {"fromat": 0.5})


def shares(prompts, completions, answers):
    return [len(text) / 4 for text in completions]


def parts(prompts, completions, answers):
    return {"brief": np.array([1.0 / len(text) for text in completions]), "polite": [2] * len(completions)}


def accuracy_and_style(prompts, completions, answers):
    return {"accuracy": [float(text == "a") for text in completions], "style": [5] * len(completions)}


async def judged(prompts, completions, answers):
    async def one(text):
        await asyncio.sleep(0.01 * len(text))
        return len(text)

    return await asyncio.gather(*map(one, completions))


def with_columns(prompts, completions, answers, columns):
    assert columns.keys() <= {"level", "hint"}
    return [0.0 if level is None else level for level in columns["level"]]


def with_options(prompts, completions, answers, *, scale=2.0):
    return [scale] * len(completions)


def test_functions_of_the_users_own():
    assert scores_of(custom(shares), ["ab", "abcd"]).rewards.tolist() == [0.5, 1]
    assert scores_of(custom(shares), ["ab", "abcd"]).accurate.tolist() == [False, True]
    assert scores_of(custom(parts), ["ab", "abcd"]).rewards.tolist() == [2.5, 2.25]
    assert scores_of(custom(parts, polite=0.5), ["ab", "abcd"]).rewards.tolist() == [1.5, 1.25]
    assert scores_of(custom(accuracy_and_style), ["a", "b"]).accurate.tolist() == [True, False]
    assert scores_of(custom(judged), ["ab", "a"]).rewards.tolist() == [2, 1]
    rows = [{"level": 3}, {"hint": "h"}]
    assert scores_of(custom(with_columns), ["a", "b"], columns=rows).rewards.tolist() == [3, 0]
    assert scores_of(custom(with_options), ["a"]).rewards.tolist() == [2]
    assert scores_of(custom(shares), ["ab"]).failures.tolist() == [0]


LOCK, SEMAPHORE = asyncio.Lock(), asyncio.Semaphore(1)


async def judged_in_turn(prompts, completions, answers):
    """One completion after another, by means of what the module holds."""

    async def one(text):
        async with LOCK, SEMAPHORE:
            await asyncio.sleep(0.001)
            return len(text) if text != "leave" else sys.exit(3)

    return await asyncio.gather(*map(one, completions))


def test_module_state_works_in_every_batch_and_run():
    own_rewards.known_parts(custom(judged_in_turn), Answered("", "", "", {}, 0))
    for _ in range(2):
        with Grading(CONFIG, custom(judged_in_turn)) as grading:
            for _ in range(2):
                assert submitted(grading, ["a", "ab", "abc"]).result().rewards.tolist() == [1, 2, 3]
            # A task that would end the event loop ends its own batch.
            with pytest.raises(ValueError, match=r"failed with SystemExit: 3[\s\S]* in one: "):
                submitted(grading, ["a", "leave", "abc"]).result(timeout=60)


class Judge:
    """A reward that is no function."""

    async def __call__(self, prompts, completions, answers):
        async with LOCK:
            return [1.0] * len(completions)


def test_an_object_may_judge():
    reward = Reward("judge", Judge(), False, {"length": 0.0})
    assert scores_of(reward, ["a"]).rewards.tolist() == [1]


def none_for_b(prompts, completions, answers):
    return [None if text == "b" else 1.0 for text in completions]


def of_two_tasks(prompts, completions, answers):
    """Each function of a part applies to some completions, as TRL's functions of several tasks do."""
    return {
        "math": [{"a": 1.0, "c": 0.5}.get(text) for text in completions],
        "code": [{"b": 1.0, "c": 0.25}.get(text) for text in completions],
    }


def unjudged(prompts, completions, answers):
    return {"accuracy": [None if text == "b" else 1.0 for text in completions], "style": [5.0] * len(completions)}


@pytest.mark.parametrize("workers", [False, *slow(True)])
def test_none_in_all_parts_is_no_reward(workers):
    def scores(function, completions, **weights):
        if workers:
            return scores_of(load_reward("python:own", weights, function=function), completions, PATIENT)
        return scores_of(custom(function, **weights), completions)

    found = scores(none_for_b, ["a", "b"])
    assert np.isnan(found.rewards).tolist() == found.accurate.tolist()[::-1] == [False, True]
    assert [FAILURES[place] for place in found.failures] == ["none", "no_reward"]
    found = scores(of_two_tasks, ["a", "b", "c", "d"], code=2.0)
    np.testing.assert_array_equal(found.rewards, [1, 2, 1, np.nan])
    np.testing.assert_array_equal(found.parts["math"], [1, np.nan, 0.5, np.nan])
    assert np.isnan(found.accurate).all(), "a completion has two parts, and none is the verdict"
    assert [FAILURES[place] for place in found.failures] == ["none"] * 3 + ["no_reward"]
    found = scores(unjudged, ["a", "b"])
    assert (found.rewards.tolist(), found.accurate.tolist()) == ([6, 5], [True, False]), "not known to be right"
    found = scores(unjudged, ["a", "b"], style=0.0)
    np.testing.assert_array_equal(found.rewards, [1, np.nan], "a measurement makes no reward")


def has_5(prompts, completions, answers):
    return [float("5" in text) for text in completions]


async def has_5_async(prompts, completions, answers):
    return has_5(prompts, completions, answers)


def has_5_model(folder, device):
    return has_5


def right_and_polite(prompts, completions, answers):
    return {"right": has_5(prompts, completions, answers), "polite": [0.0] * len(completions)}


def right_by_task(prompts, completions, answers):
    return {"sums": [float("5" in text) if text[-1] == "!" else None for text in completions],
            "others": [float("5" in text) if text[-1] != "!" else None for text in completions]}  # fmt: skip


def score_and_checks(prompts, completions, answers):
    return {"score": has_5(prompts, completions, answers), "checks": [9.0] * len(completions)}


def verdict_and_style(prompts, completions, answers):
    return {"accuracy": has_5(prompts, completions, answers), "style": [5.0] * len(completions)}


HERE = f"{__name__}:"
KINDS = {  # the function or its name, and the parts that it returns
    "numbers": (HERE + "has_5", ["score"]),
    "async": (HERE + "has_5_async", ["score"]),
    "parts": (HERE + "right_and_polite", ["right", "polite"]),
    "parts of tasks": (HERE + "right_by_task", ["sums", "others"]),
    "part score": (HERE + "score_and_checks", ["score", "checks"]),
    "part accuracy": (HERE + "verdict_and_style", ["accuracy", "style"]),
    "async, passed": (has_5_async, ["score"]),
    "workers, numbers": (has_5, ["score"]),
    "workers, parts": (right_and_polite, ["right", "polite"]),
    "simple": ("recjax.tasks.rewards:last_number_match", ["score"]),
    "built in": ("gsm8k", ["accuracy", "format"]),
    "model": ("model:x", ["score"]),
}


@pytest.mark.parametrize("kind", slow_except(KINDS, "numbers", "part score"))
def test_shaping_parts_change_no_verdict(kind, monkeypatch):
    function, parts = KINDS[kind]
    # A classifier's scores are numbers of a batch, as this function's are.
    monkeypatch.setattr(reward_module, "_REWARD_MODEL", HERE + "has_5_model")
    settings = {"length": {"length": -5.0}, "bonus": {"length": 5.0}, "overlong": {}, "none": {"overlong": 0.0}}
    settings |= {f"times {weight:g}": dict.fromkeys(parts, weight) for weight in (0.0, 0.5, -1.0, 7.0)}
    verdict = "right" if "right" in parts else None
    config = PATIENT.model_copy(update={"task": TaskConfig(overlong_tokens=5, verdict=verdict)})
    name, passed = ("python:own", function) if callable(function) else (function, None)
    rewards = {key: load_reward(name, weights, True, passed) for key, weights in settings.items()}
    texts = ["<answer>5</answer>", "<answer>6</answer>", "<answer>5</answer>!", "<answer>6</answer>!"]
    rows = [Answered("p", text, "5", {}, 10) for text in texts]
    found, paid = {}, set()
    with Grading(config, rewards["none"]) as grading:
        for key, grading.reward in rewards.items():
            scores = grading.submit(rows).result(timeout=60)
            found[key] = scores.accurate.tolist()
            paid.add(tuple(scores.rewards.tolist()))
    assert found == {setting: [True, False, True, False] for setting in settings}
    assert len(paid) == len(settings), "the rewards differ"


def test_ungraded_completions_are_not_accurate():
    config = CONFIG.model_copy(update={"task": TaskConfig(success=-1.0)})
    scores = scores_of(load_reward("python:own", function=has_5), ["5", "x" * 5_001], config)
    assert (scores.rewards.tolist(), scores.accurate.tolist()) == ([1, 0], [True, False])


STORED = [  # reward and parts of a stored completion whose grade does not say whether it is accurate
    (1.0, None, True),
    (0.9, None, False),
    (0.0, {"format": 1.0}, False),  # the parts of others need not be complete
    (1.5, {"helpful": 0.5}, True),
    (0.2, {"accuracy": 1.0, "length": 0.4}, True),
    (0.7, {"score": 1.0, "length": 0.4, "overlong": -0.3}, True),  # exported by recjax, and imported again
    (1.2, {"score": 0.8, "turns": 4.0}, False),
    (0.7, {"right": 1.0, "rows": 3.0}, True),
]


@pytest.mark.parametrize(("reward", "parts", "right"), STORED)
def test_stored_rewards_follow_the_same_rule(reward, parts, right):
    one = Completion("a", "b", "", (), None, 0, False, Grade(reward, parts))
    assert as_trained(one, TaskConfig(), 0).grade.accurate is right
    assert as_trained(one._replace(grade=Grade(reward, parts, not right)), TaskConfig(), 0).grade.accurate is not right


def test_success_is_compared_as_training_keeps_rewards():
    one = Completion("a", "b", "", (), None, 0, False, Grade(float(np.float32(0.9))))
    assert as_trained(one, TaskConfig(success=0.9), 0).grade.accurate
    assert not as_trained(one, TaskConfig(success=0.91), 0).grade.accurate


def test_a_warning_says_how_to_name_the_verdict(caplog):
    reward_module.warn_of_no_verdict.cache_clear()
    for function, count in (
        (right_by_task, 0),
        (score_and_checks, 0),
        (verdict_and_style, 0),
        (right_and_polite, 1),
        (right_and_polite, 1),
    ):
        scores_of(custom(function), ["5", "5!"])
        said = [record.getMessage() for record in caplog.records if "none is the verdict" in record.getMessage()]
        assert len(said) == count
    assert said[0].startswith("a reward has the parts right, polite, and none is the verdict: recjax shows the reward")
    assert "task.verdict" in said[0]


WITH_VERDICT = CONFIG.model_copy(update={"task": TaskConfig(verdict="right")})


def only_one_part(prompts, completions, answers):
    return {"sums": [1.0 if text == "5" else None for text in completions],
            "others": [1.0 if text != "5" else None for text in completions]}  # fmt: skip


def test_grades_without_a_verdict_are_neither_right_nor_wrong():
    with Grading(CONFIG, custom(right_and_polite)) as grading:
        grades = Grades(submitted(grading, ["5", "6"]), 2).result()
    assert [(grade.reward, grade.accurate) for grade in grades] == [(1.0, None), (0.0, None)]


def test_a_failed_completion_takes_no_verdict_from_others():
    scores = scores_of(load_reward("python:own", function=only_one_part), ["5", "6", "x" * 5_001], PATIENT)
    assert scores.accurate.tolist() == [True, True, False]


def test_several_parts_have_the_verdict_that_the_config_names():
    assert np.isnan(scores_of(custom(right_and_polite), ["5", "6"]).accurate).all()
    assert scores_of(custom(right_and_polite), ["5", "6"], WITH_VERDICT).accurate.tolist() == [True, False]
    with pytest.raises(ValueError, match=r"task.verdict = 'right': the reward .* has the parts score; name one"):
        scores_of(custom(has_5), ["5"], WITH_VERDICT)


@pytest.mark.parametrize(
    "block",
    [
        {"task": TaskConfig(curriculum={})},
        {"task": TaskConfig(keep={})},
        {"training": TrainingConfig(keep_best="-evaluation/accuracy")},
    ],
)
def test_keys_that_read_accuracy_refuse_rewards_without_verdict(block):
    config = CONFIG.model_copy(update=block)
    with pytest.raises(ValueError, match=r"reads which answers are right, and .* has the parts right, polite, none"):
        scores_of(custom(right_and_polite), ["5"], config)
    scores_of(custom(verdict_and_style), ["5"], config)


@pytest.mark.parametrize("name", ["gsm8k", HERE + "has_5"])
def test_counts_weigh_nothing_in_every_reward(name):
    weights = load_reward(name).weights
    assert weights["length"] == weights["turns"] == weights["rows"] == 0
    assert load_reward(name, {"length": 2.0}).weights["length"] == 2


def own_length(prompts, completions, answers):
    return {"accuracy": [1.0] * len(completions), "length": [-0.2] * len(completions)}


def length(prompts, completions, answers):
    return [-0.5] * len(completions)


def texts(prompts, completions, answers):
    return "5" * len(completions)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (own_length, "has a part 'length'; recjax itself adds .*rename it, for example to length_penalty"),
        ((has_5, length), "has a part 'length'"),
        (texts, "a text is no number"),
    ],
)
def test_parts_with_recjaxs_names_and_texts_are_refused(function, message):
    with pytest.raises(ValueError, match=message):
        scores_of(Reward("own", function, False, {"length": 0.0}), ["5", "6"])


def other_parts_for_b(prompts, completions, answers):
    return {"right": [1.0], "style" if completions == ["a"] else "brief": [2.0]}


def test_parts_that_change_between_batches_are_refused():
    with Grading(CONFIG, custom(other_parts_for_b)) as grading:
        submitted(grading, ["a"]).result()
        with pytest.raises(ValueError, match="returned the parts brief, right, and earlier right, style; it must"):
            submitted(grading, ["b"]).result()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def score(:\n", r"SyntaxError: .*\(broken\.py, line 1\)"),
        ("x = 1\ny = 1 / 0\n", r"ZeroDivisionError: division by zero\n  .*broken\.py:2 in <module>: y = 1 / 0$"),
        ("import nothing_of_this_name\n", r"ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("def scores(): ...\n", r"broken has no function 'score'; did you mean 'scores'\?$"),
    ],
)
def test_a_failed_import_shows_the_users_own_lines(tmp_path, monkeypatch, text, reason):
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"task.reward = 'broken:score': .*{reason}") as error:
        load_reward("broken:score")
    assert "importlib" not in str(error.value)


def test_success_is_the_reward_where_there_is_no_accuracy():
    config = CONFIG.model_copy(update={"task": TaskConfig(success=0.5)})
    assert scores_of(custom(shares), ["a", "ab"], config).accurate.tolist() == [False, True]


def too_few(prompts, completions, answers):
    return [1.0]


def not_a_number(prompts, completions, answers):
    return [1.0, np.nan]


def fails_on_b(prompts, completions, answers):
    def known(text):
        return {"a": 1}[text]

    return list(map(known, completions))


def test_async_rewards_are_retried_within_their_time(monkeypatch, caplog):
    monkeypatch.setattr(own_rewards, "FIRST_WAIT", 0.01)
    asked = []

    async def judge(prompts, completions, answers):
        asked.append(completions)
        if len(asked) == 1:
            await asyncio.sleep(10)
        if len(asked) == 2:
            raise ConnectionError("busy")
        return [1.0] * len(completions)

    patient = custom(judge)._replace(seconds=0.1, retries=2)
    np.testing.assert_array_equal(scores_of(patient, ["a", "b"]).rewards, [1, 1])
    assert asked == [["a", "b"]] * 3
    said = [record.getMessage() for record in caplog.records if "asked again" in record.getMessage()]
    assert "no reward within task.reward_seconds = 0.1; it is asked again in 0.01 s" in said[0]
    assert "ConnectionError: busy; it is asked again in 0.02 s" in said[1] and len(said) == 2
    asked.clear()
    with pytest.raises(ValueError, match="failed with ConnectionError: busy"):
        scores_of(patient._replace(retries=1), ["a"])


async def fails_on_b_async(prompts, completions, answers):
    return fails_on_b(prompts, completions, answers)


def fails_on_two(prompts, completions, answers):
    if len(completions) > 1:
        raise KeyError("oops")
    return [1.0]


def huge(prompts, completions, answers):
    return [0.0, 1e300]


def beyond_float32(prompts, completions, answers):
    return [0.0, -1e39]


def whole_and_huge(prompts, completions, answers):
    return [0, 10**400]


def leaves(prompts, completions, answers):
    sys.exit(0)


def leaves_on_b(prompts, completions, answers):
    return [1.0 if text == "a" else sys.exit() for text in completions]


async def canceled(prompts, completions, answers):
    raise asyncio.CancelledError


def nan_part(prompts, completions, answers):
    return {"style": [1.0, float("inf")]}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (too_few, "returned 1 rewards for 2 completions"),
        (not_a_number, r"nan for completion 'b' \(row 1, answer 'a'\)"),
        (fails_on_b, r"failed with KeyError: 'b'\n  .*test_grading.py:\d+ in fails_on_b: .*\n  .* in known: "),
        (fails_on_b_async, r"failed with KeyError: 'b'\n  .*in fails_on_b_async: .*\n  .* in fails_on_b: "),
        (fails_on_two, r"failed with KeyError: 'oops'\n  .*test_grading.py:\d+ in fails_on_two: raise"),
        (huge, r"returned 1e\+300 for completion 'b' .*at most 1e\+09 either way"),
        (beyond_float32, r"returned -1e\+39 for completion 'b'"),
        (whole_and_huge, "return a number or None per completion"),
        (leaves, r"failed with SystemExit: 0\n.* in leaves: "),
        (leaves_on_b, r"failed with SystemExit: \n.* in leaves_on_b: "),
        (canceled, "failed with CancelledError"),
        (nan_part, "part 'style', returned inf for completion 'b'"),
    ],
)
def test_a_faulty_function_is_named_with_its_row(function, message):
    with pytest.raises(ValueError, match=f"test_grading:{function.__name__}.*{message}"):
        scores_of(custom(function), ["a", "b"])


def test_weights_that_make_rewards_infinite_are_refused():
    with pytest.raises(
        ValueError, match=r"the sum of its parts.*is 1e\+20 for completion 'abcd'.*lower task.reward_weights"
    ):
        scores_of(custom(shares, score=1e20), ["abcd"])


def test_a_module_that_exits_on_import_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "leaves_at_once.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ValueError, match=r"task.reward = 'leaves_at_once:f': importing .* ends the program .SystemExit: 0"
    ):
        load_reward("leaves_at_once:f")


def test_weights_of_unknown_parts_are_refused_at_first_use():
    with pytest.raises(ValueError, match=r"task.reward_weights.poilte: .*parts has the parts brief, polite, length"):
        scores_of(custom(parts, poilte=1.0), ["a"])


@pytest.mark.parametrize("name", ["no_such_module:f", "math:no_such_function", "math:pi"])
def test_a_reward_that_cannot_be_imported_is_named(name):
    with pytest.raises(ValueError, match=name):
        load_reward(name)


def test_functions_in_this_process_start_no_other():
    with Grading(CONFIG, custom(shares)) as grading:
        assert submitted(grading, ["abcd"]).result().rewards == [1] and grading._workers is None


@pytest.mark.slow
def test_votes_are_read_in_worker_processes_under_their_limits():
    patch = pytest.MonkeyPatch()
    faulty = "tests.rewards.faulty_graders"
    patch.setitem(GRADERS, "faulty", Grader(f"{faulty}:grade", {"accuracy": 1.0}, f"{faulty}:parse"))
    with Grading(CONFIG, load_reward("faulty")) as grading:
        assert submitted(grading, ["a"]).result().rewards == [1]
        found = grading.parsed(["a", "sleep", "exit", "memory", "deep", "raise", "x" * 5_001, "none", "b"])
        assert found == ["A", None, None, None, None, None, None, None, "B"]
    patch.undo()
    with Grading(CONFIG, custom(shares)) as grading:
        assert grading.parsed([" a ", "b"]) == ["a", "b"]
