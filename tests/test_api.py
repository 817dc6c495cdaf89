"""Runs from Python: problems and rewards of a program, watching and stopping, resuming, checkpoints, the policy."""

import functools
import gc
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest

import recjax
from recjax import Config, api, open_run, run
from recjax.config import GradingConfig, load_config
from recjax.hub.policy import policy_alone
from recjax.logs.kept_samples import samples_folder
from recjax.logs.metrics import read_metrics
from recjax.models.sampling import Sampling
from recjax.planning.dry_run import print_dry_run, warn_of_memory
from recjax.rewards.custom import Answered, custom_parts, needs_answers, with_columns
from recjax.rewards.pool import FAILURES, Grading
from recjax.rewards.reward import load_reward, named_weights, passed_name
from recjax.runs import start
from recjax.runs.checkpoint import best_step, steps_of
from recjax.runs.policies import OpenedPolicy
from recjax.runtime import console
from recjax.runtime import memory as host_memory
from recjax.tasks.files import keep_rows
from recjax.tasks.loading import load_task
from recjax.tasks.problems import Problem
from recjax.training import loop
from tests.rewards.test_grading import CONFIG, submitted
from tests.training.counting import CountingLearner, Interrupted, killed, prepared_batch, sampled_by
from tests.training.tiny_run import TINY, one_device, without_figures, without_times

ROOT = Path(__file__).parents[1]
ROWS = [{"prompt": f"{a}+{b}=", "answer": a + b, "kind": "sum"} for a in range(1, 10) for b in range(1, 10)]
VALUES = {
    "model": {"decoder": dict(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=32)},
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_completion_tokens": 3},
    "algorithm": {"preset": "rec_one_side_nois"},
    "training": {"steps": 7, "checkpoint_every": 3},
    "evaluation": {"every": 3, "problems": 10},
}


def digits(prompts, completions, answers) -> list[float]:
    """Share of a completion's three places that hold a digit."""
    return [sum(character.isdigit() for character in text) / 3 for text in completions]


@pytest.fixture(autouse=True)
def cached(tmp_path, monkeypatch):
    """A cache and figures of the test's own."""
    monkeypatch.setenv("RECJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("recjax.logs.log.draw_training", lambda *given: given[2].parent.mkdir(exist_ok=True))


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """A function that calls `run` without compiled programs; the name of its folder, and arguments of `run`."""

    def call(name, values=VALUES, problems=ROWS, learner=None, check=lambda run: None, **arguments):
        seams = {"learner": learner or CountingLearner(), "sources": sampled_by(prepared_batch)}
        monkeypatch.setattr(api, "warn_of_memory", check)  # it traces a decoder, which takes most of such a run
        monkeypatch.setattr(api, "train", functools.partial(start.train, **seams))
        with one_device(), without_figures():
            values = values if isinstance(values, Config | Path) else {**values, "output": str(tmp_path / name)}
            return run(values, problems=problems, **arguments)

    return call


def rows_of(result):
    return without_times(read_metrics(result.folder / "metrics.jsonl"))


def test_dict_config_and_file_give_one_config(counted, tmp_path):
    estimated = []
    first = counted("run", overwrite=True, check=lambda run: estimated.append(warn_of_memory(run)))
    assert len(estimated) == 1, "the run's memory is estimated before its first step"
    assert isinstance(first, recjax.Result) and first.folder == tmp_path / "run"
    kept = first.config.task.file.train
    assert kept == keep_rows(ROWS) and load_config(first.folder / "config.yaml") == first.config
    content = (first.folder / f"problems-{kept.partition(':')[2]}.jsonl").read_text()
    assert [json.loads(line) for line in content.splitlines()] == ROWS
    again = counted("run", learner=killed(at=1))  # it is finished, so no update runs
    assert rows_of(again) == rows_of(first) and list(first.metrics["step"]) == list(range(8))
    assert first.summary["steps"] == 7 and "7 of 7 steps" in repr(again)
    as_config = counted("", Config(**VALUES, output=str(tmp_path / "config")))
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY.replace("unset", str(tmp_path / "yaml")))
    from_file = counted("", path, problems=None)
    assert rows_of(as_config) == rows_of(first) and from_file.config.task.arithmetic


def test_pictures_are_figures_and_samples_a_table(counted):
    result = counted("run")
    figure = result.plot()
    names = [axes.get_ylabel() for axes in figure.axes]
    assert names[0].startswith("accuracy") and "rec_one_side_nois: run" in figure.get_suptitle()
    chosen = result.plot("reward", "entropy").axes
    assert [axes.get_ylabel().split("\n")[0] for axes in chosen] == ["reward of", "entropy of π"]
    with pytest.raises(ValueError, match="metric 'rewart': .* name one of reward"):
        result.plot("rewart")
    samples = result.samples()
    assert set(samples["step"]) == {1} and {"group", "accurate", "reward"} <= set(samples)
    shutil.rmtree(samples_folder(result.folder))
    with pytest.raises(ValueError, match=r"holds no completions; set samples.every above 0"):
        result.samples()


def test_only_plans_for_this_machine_warn_of_its_dtype(monkeypatch, caplog):
    monkeypatch.setattr("recjax.hub.policy.cpu_has_bfloat16", lambda: False)
    values = {"problems": ROWS, "reward": digits, "steps": 1}
    recjax.plan_run(VALUES, device="v5e:1x1", **values)
    assert "lacks bfloat16" not in caplog.text
    recjax.plan_run(VALUES, **values, **{"model.dtype": "bfloat16"})
    assert "this CPU lacks bfloat16" in caplog.text


def test_a_plan_says_what_the_dry_run_prints(tmp_path, capsys):
    plan = recjax.plan_run(VALUES, problems=ROWS, reward=digits, steps=9)
    assert plan.starts and plan.config.training.steps == 9 and list(plan.staleness) == [0] * 9
    assert not list(tmp_path.glob("runs/*")) and plan.table["bytes"].sum() > 0
    assert "staleness of steps 1 to" in str(plan) and capsys.readouterr().out == ""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    options = ["model.decoder.hidden_size=65536", "model.decoder.num_layers=64"]
    too_large = recjax.plan_run(path, device="h100-80", **dict(option.split("=") for option in options))
    assert not too_large.fits and not too_large.starts and "it does not fit" in str(too_large)
    assert print_dry_run(str(path), options, "h100-80") == 1
    assert capsys.readouterr().out == str(too_large)


def test_importing_the_package_and_its_config_needs_nothing_heavy():
    program = "import sys, recjax; recjax.Config; print({'jax', 'flax', 'transformers'} & {*sys.modules}, dir(recjax))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("set() ") and "'open_run'" in done.stdout, done.stderr
    with pytest.raises(AttributeError, match="module 'recjax' has no attribute 'rum'"):
        recjax.rum  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize(("before", "finds"), [("", False), ("import transformers", True)])
def test_a_program_without_transformers_waits_for_no_torch(before, finds):
    program = f"{before}\nimport recjax\nrecjax.run\nimport transformers\n"
    program += "assert transformers.utils.is_torch_available() == FINDS\nimport torch"
    line = [sys.executable, "-c", program.replace("FINDS", str(finds))]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_frames_data_sets_and_arrays_give_equal_rows():
    others = [
        pd.DataFrame(ROWS),
        datasets.Dataset.from_list(ROWS),
        [row | {"answer": np.int64(row["answer"])} for row in ROWS],
    ]
    assert {keep_rows(rows) for rows in others} == {keep_rows(ROWS)} != {keep_rows(ROWS[1:])}


@pytest.mark.parametrize(
    ("problems", "message"),
    [
        ([], "there are no rows"),
        ([*ROWS, "1+1="], "row 81 must be a dict of columns; got '1\\+1='"),
        ([{"prompt": "1+1=", "answer": {2}}], "row 0: column 'answer': must hold text .*a value of type set"),
        ({"prompt": ["1+1="], "answer": [2]}, "a mapping with train and evaluation"),
        ([*ROWS, {"prompt": "1+1=", "answer": None}], "problems: row 81: no 'answer'; the row has 'prompt'"),
        (None, "the config has no task; set one, or pass problems"),
        ("rows.jsonl", "problems = 'rows.jsonl': takes rows; name a file as task.file.train"),
    ],
)
def test_unusable_problems_are_refused_and_leave_nothing(counted, tmp_path, problems, message):
    with pytest.raises(ValueError, match=message):
        counted("run", problems=problems)
    assert not (tmp_path / "run").exists()


def test_problems_beside_a_task_are_refused(counted, tmp_path):
    with pytest.raises(ValueError, match="the config has the task gsm8k; remove it"):
        counted("run", VALUES | {"task": "gsm8k"})
    (tmp_path / "no_task.yaml").write_text(json.dumps(VALUES | {"output": "unset"}))
    with pytest.raises(ValueError, match="give exactly one of task.arithmetic.*found none"):
        load_config(tmp_path / "no_task.yaml")


def test_a_mapping_that_merges_and_an_object_are_named(tmp_path):
    (tmp_path / "c.yaml").write_text(
        json.dumps(VALUES | {"output": "x", "task": "arithmetic", "experience": {"store": "s"}})
    )
    with pytest.raises(ValueError) as error:
        run(tmp_path / "c.yaml", experience={"mix": {"store": "t", "share": 0.5, "of": "batch"}})
    for part in (
        "experience.mix is from argument experience",
        f"experience.store is from {tmp_path}/c.yaml",
        "mapping adds",
    ):
        assert part in str(error.value)
    with pytest.raises(
        ValueError, match="model.path = <object .*: takes text or null; give a folder or hub name, from wh"
    ):
        run(model=object(), problems=ROWS, reward=digits)


def test_a_script_sees_the_messages_of_a_run(monkeypatch, capsys):
    package = logging.getLogger("recjax")
    for name, value in (("handlers", []), ("propagate", True), ("level", logging.NOTSET)):
        monkeypatch.setattr(package, name, value)
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    console.show_messages()
    assert not package.handlers, "the program has set up logging"
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    console.show_messages()
    package.info("evaluating the initial policy")
    assert capsys.readouterr().err == "evaluating the initial policy\n"


def test_a_script_that_is_stopped_ends_with_one_line():
    program = "import signal; from recjax.training.loop import Preempted; raise Preempted(3, signal.SIGINT)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    words = "stopped after step 3; the same command or call resumes from its checkpoint\n"
    assert (done.returncode, done.stderr) == (1, words)


def test_own_rows_are_held_out_by_name(counted):
    result = counted("run", problems={"train": ROWS[:60], "test": ROWS[60:]})
    assert result.config.task.file.evaluation == keep_rows(ROWS[60:])
    asked = [json.loads(line)["prompt"] for line in (result.folder / "samples" / "after.jsonl").open()]
    assert set(asked) <= {row["prompt"] for row in ROWS[60:]}


def test_on_step_sees_rows_and_stops_the_run(counted):
    seen = []
    stopped = counted("stopped", on_step=lambda row: seen.append(row["step"]) or row["step"] == 2)
    last = steps_of(stopped.folder / "checkpoints")[-1]
    assert seen == list(range(last + 1)) and 2 <= last <= 3 and stopped.summary is None
    straight, resumed = counted("straight"), counted("stopped", on_step=lambda row: seen.append(row["step"]))
    assert rows_of(resumed) == rows_of(straight) and seen == list(range(8))
    assert resumed.summary["steps"] == 7
    longer = counted("stopped", VALUES | {"training": {"steps": 20}}, on_step=lambda row: row["step"] == 8)
    assert longer.summary is None, "the summary is of step 7"


def test_on_step_stops_a_run_only_by_true(counted, caplog):
    async def waits(row):
        pass

    with pytest.raises(ValueError, match="on_step .*takes a function, not async"):
        counted("refused", on_step=waits)
    for returned, shown in ((1, "1"), (np.zeros(2), "array"), ("no", "'no'")):
        with pytest.raises(ValueError, match=f"on_step returned {shown}.*; return True to stop"):
            counted("chance", on_step=lambda row, returned=returned: returned)
    with pytest.raises(ValueError, match="on_step returned <coroutine .*; write it as def, not async def"):
        counted("chance", on_step=lambda row: waits(row))
    with caplog.at_level("INFO", "recjax"):
        counted("stopped", on_step=lambda row: np.bool_(row["step"] == 2))
    assert "on_step asked to stop after step 2" in caplog.text


@pytest.mark.slow
def test_a_run_hides_programs_from_the_garbage_collector(counted, monkeypatch):
    gc.unfreeze()
    monkeypatch.setattr(host_memory, "close_gaps", lambda: 1)  # as in a command
    frozen = []
    counted("run", on_step=lambda row: frozen.append(gc.get_freeze_count()))
    assert frozen[0] == 0 < frozen[-1] and gc.get_freeze_count() == 0
    gc.freeze()  # what the tests import


def test_ctrl_c_saves_and_the_same_call_resumes(counted):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(loop.Preempted, match="call resumes"):
        counted("stopped", learner=Interrupted(5, lambda: signal.raise_signal(signal.SIGINT)))
    signal.signal(signal.SIGINT, before)
    assert rows_of(counted("stopped")) == rows_of(counted("straight"))


def test_changed_problems_and_rewards_are_refused_with_remedies(counted, tmp_path):
    result = counted("run", VALUES | {"training": {"steps": 2}}, reward=digits)
    assert result.metrics["grading/timeout"].iloc[-1] == 0, "it is counted, as the function runs in a worker"
    longer = VALUES | {"training": {"steps": 3}}
    for changed in ({"problems": ROWS[1:]}, {"reward": lambda prompts, completions, answers: [1.0] * len(answers)}):
        with pytest.raises(ValueError, match="of another config .task.*overwrite=True in a program"):
            counted("run", longer, **{"reward": digits} | changed)
    with pytest.raises(ValueError, match="a program passed this function to recjax.run; pass it again"):
        counted("run", tmp_path / "run" / "config.yaml", problems=None, overwrite=True)
    assert counted("run", longer, reward=digits).summary["steps"] == 3
    assert len(counted("run", longer, ROWS[1:], reward=digits, overwrite=True).metrics) == 4
    with pytest.raises(ValueError, match="reward: the config has task.reward = 'math'; remove it, or pass no reward"):
        counted("other", VALUES | {"task": {"reward": "math"}}, reward=digits)


def test_a_run_continues_in_a_folder_that_was_moved(counted, tmp_path):
    counted("old", VALUES | {"training": {"steps": 2}})
    (tmp_path / "old").rename(tmp_path / "new")
    (tmp_path / "cache").rename(tmp_path / "gone")
    assert open_run(tmp_path / "new").config.output == str(tmp_path / "new")
    assert len(counted("new", VALUES | {"training": {"steps": 4}}).metrics) == 5


def test_changed_rows_are_noticed_and_restored(counted, tmp_path):
    result = counted("run", VALUES | {"training": {"steps": 2}})
    (path,) = result.folder.glob("problems-*.jsonl")
    whole = path.read_text()
    path.write_text(whole.replace('"answer": 2,', '"answer": 3,', 1))
    (tmp_path / "cache").rename(tmp_path / "gone")
    with pytest.raises(ValueError, match=f"neither in {path} nor in the cache"):
        load_task(result.config)
    counted("run", VALUES | {"training": {"steps": 3}})
    assert path.read_text() == whole


@pytest.mark.parametrize("metric", ["-evaluation/accuracy", "loss", "-loss"])
def test_the_best_checkpoint_stays(counted, metric):
    training = {"steps": 7, "keep_checkpoints": 1, "keep_best": metric}
    result = counted("run", VALUES | {"training": training, "evaluation": {"every": 2, "problems": 10}})
    values = result.metrics.set_index("step")[metric.removeprefix("-")][[0, 2, 4, 6, 7]].dropna()
    best = values.idxmin() if metric.startswith("-") else values.idxmax()
    assert best_step(result.folder, metric) == best
    assert set(steps_of(result.folder / "checkpoints")) == {best, 7}


def test_a_metric_that_no_checkpoint_has_is_refused(counted):
    with pytest.raises(ValueError, match="metric 'evaluation/acuracy'.*did you mean 'evaluation/accuracy'"):
        counted("typo", VALUES | {"training": {"keep_best": "evaluation/acuracy"}})


# --- Rewards of a program.


def test_a_functions_digest_follows_code_and_values(tmp_path, monkeypatch):
    def named(text):
        path = tmp_path / f"rewards{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        return passed_name(vars(__import__(path.stem))["score"])

    plain = named("def score(p, c, a):\n    return [1.0 for _ in c]\n")
    assert plain == named("import os\n\n\ndef score(p, c, a):  # each\n    return [ 1.0 for _ in c ]\n")
    assert plain.startswith("python:score#") and plain != named("def score(p, c, a):\n    return [2.0 for _ in c]\n")
    weighted = "weight = {}\nscore = lambda p, c, a: [weight for _ in c]\n"
    assert named(weighted.format(1)) != named(weighted.format(2)) and named(weighted.format(1)).startswith(
        "python:lambda#"
    )
    assert passed_name(eval("lambda p, c, a: [1.0]")) == "python:lambda", "its source is not at hand"
    both = [digits, eval("lambda p, c, a: [1.0]")]
    assert passed_name(both).startswith("python:digits+lambda#") and passed_name(both) != passed_name(both[::-1])
    for value in ("mine:score", [], [digits, "mine:score"]):
        with pytest.raises(ValueError, match=r"reward = .*: takes a function, or a list of functions"):
            passed_name(value)


def test_a_list_of_functions_gives_reward_parts():
    """TRL's list, in which each function has a signature of its own, and None where it does not apply."""

    def accuracy(completions, solution, **columns):
        return [float(text == answer) if answer else None for text, answer in zip(completions, solution, strict=True)]

    async def style(prompts, completions, **columns):
        return {"short": [float(len(text) < 3) for text in completions]}

    functions = [accuracy, style, digits, digits]
    weights = named_weights(functions, [1.0, 0.5, 0.25, 0.0])
    assert weights == {"accuracy": 1.0, "style": 0.5, "digits": 0.25, "digits_2": 0.0}
    with pytest.raises(ValueError, match=r"task.reward_weights = \[1.0\]: takes a weight for each .*; there are 4"):
        named_weights(functions, [1.0])
    weights = {"short": 0.5, "digits": 0.25, "digits_2": 0.0}
    reward = load_reward(passed_name(functions), weights, function=functions)._replace(answer="solution")
    rows = [Answered("p", "12", "12", {}, 1), Answered("p", "abc", "", {}, 1)]
    parts = custom_parts(reward, rows)
    assert list(parts) == ["accuracy", "short", "digits", "digits_2"]
    np.testing.assert_array_equal(parts["accuracy"], [1.0, np.nan])
    np.testing.assert_array_equal(parts["short"], [1.0, 0.0])
    with Grading(CONFIG, reward) as grading:  # in worker processes
        scores = submitted(grading, ["3", "123"], ["3", ""]).result(timeout=60)
    np.testing.assert_allclose(scores.rewards, [1 + 0.5 + 0.25 / 3, 0.25])
    assert needs_answers(reward) and not needs_answers(reward._replace(function=(style,)))
    with pytest.raises(ValueError, match="takes .*level.*, but no problem has a column 'level'"):
        with_columns(reward._replace(function=(digits, lambda completions, level: completions)), [Problem("p", "1")])
    with pytest.raises(ValueError, match="two return the part 'short'"):
        custom_parts(reward._replace(function=(style, style)), rows)


def test_keys_have_short_names_with_any_config(counted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = {"model": Path("folder/tiny"), "steps": 5, "learning_rate": 1e-5, "rollout.group_size": 4, "seed": 3}
    config = api._with_task(None, ROWS, [digits, digits], {**named, "task.reward_weights": [1.0, 0.5]})
    assert (config.model.path, config.training.steps, config.seed) == ("folder/tiny", 5, 3)
    assert config.optimizer.learning_rate == 1e-5 and config.rollout.group_size == 4
    assert config.task.reward_weights == {"digits": 1.0, "digits_2": 0.5}
    same = api._with_task(None, ROWS, digits, named)
    assert Path(same.output).parent.name == "runs" and Path(same.output).name.startswith("tiny-")
    others = ({"steps": 6}, {"learning_rate": 2e-5}, {"temperature": 0.5})
    folders = [api._with_task(None, ROWS, digits, named | other).output for other in others]
    assert folders[0] == same.output, "more steps continue the run"
    assert len({same.output, config.output, *folders, api._with_task(None, ROWS[1:], digits, named).output}) == 5
    assert same.replace(steps=6) == api._with_task(same, None, None, {"steps": 6}) != same
    assert same.replace(task=same.task.model_dump()).task == same.task
    assert same.replace(algorithm="opmd").algorithm.preset == "opmd"
    odd = same.replace(output="a${b}")
    assert odd.output == odd.replace(steps=6).output == "a${b}"
    with pytest.raises(ValueError, match="unknown key .lerning_rate.*did you mean .optimizer.learning_rate"):
        same.replace(lerning_rate=1)
    for name, instead in {"train_dataset": "problems=", "reward_funcs": "reward=", "args": "each setting"}.items():
        with pytest.raises(ValueError, match=f"{name}: recjax.run takes {instead}"):
            api._with_task(None, None, None, {name: ROWS})
    first = counted("", Config(**VALUES, output="run"), steps=3, seed=1, reward=digits)
    assert first.summary["steps"] == 3 and first.config.seed == 1 and str(first.folder) == "run"


def test_a_closure_grades_in_worker_processes():
    right = {"a": 1.0, "b": 0.5, "none": None}

    def score(prompts, completions, answers, columns):
        if "exit" in completions:
            os._exit(1)
        if "sleep" in completions:
            time.sleep(60)
        return {"right": [right[text] for text in completions], "count": [len(completions)] * len(completions)}

    reward = load_reward("python:score", {"count": 0.0}, function=score)
    config = CONFIG.model_copy(update={"grading": GradingConfig(seconds=0.5, max_characters=5_000)})
    said = ["a", "b", "none", "sleep", "exit", "x" * 5_001]
    expected = ["none", "none", "no_reward", "timeout", "crash", "too_long"]
    with Grading(config, reward) as grading:
        scores = submitted(grading, said).result(timeout=60)
        assert [FAILURES[place] for place in scores.failures] == expected
        np.testing.assert_array_equal(scores.rewards, [1.0, 0.5, np.nan, 0, 0, 0])
        together = submitted(grading, ["a", "b"]).result(timeout=60)
        assert together.parts["count"].tolist() == [2, 2], "the completions of a prompt are graded together"
        with pytest.raises(ValueError, match="reward function score failed with KeyError: 'c'"):
            submitted(grading, ["a", "c"]).result(timeout=60)
    with pytest.raises(ValueError, match="cannot be sent to the grading workers.*create what it reads inside"):
        lock = threading.Lock()
        load_reward("python:score", function=lambda p, c, a: [lock.locked()])


@pytest.mark.slow
def test_rows_without_answers_train_where_the_reward_needs_none(counted):
    """TRL's quick start: rows with only a prompt. A name for the column is no hindrance."""
    rows = [{"prompt": row["prompt"]} for row in ROWS]

    def distinct(completions, **columns):
        return [float(len(set(text))) for text in completions]

    values = {"task": {"file": {"answer_column": None}}}, {"task": {"file": {"train": "rows", "answer_column": None}}}
    for number, more in enumerate(({}, *values)):
        result = counted(f"run{number}", VALUES | more, rows, reward=distinct)
        assert result.summary["steps"] == 7 and result.config.task.file.train == keep_rows(rows)
    with pytest.raises(ValueError, match="task.file.answer_column = None: the reward .*number_match compares"):
        counted("compared", VALUES | values[0], rows)
    with pytest.raises(ValueError, match="problems: row 0: no 'answer'; the row has 'prompt'"):
        counted("compared", VALUES, rows, reward=digits)
    config = VALUES | {"task": {"file": {"answer_column": "gold", "prompt_column": "question"}}}
    renamed = [{"question": row["prompt"], "gold": row["answer"]} for row in ROWS]
    assert counted("renamed", config, renamed, reward=digits).config.task.file.answer_column == "gold"


# --- The policy, without a run.


@pytest.fixture
def opened(monkeypatch):
    """A policy, and the arguments with which it would sample and evaluate."""
    values = VALUES | {"task": {"arithmetic": {"problems": ["1..9 + 1..9"]}}, "output": "unset"}
    config = Config(**{**values, "model": {"decoder": values["model"]["decoder"] | {"characters": "+= 0123456789"}}})
    policy, calls = object.__new__(api.TrainedPolicy), []
    policy._config, policy._reward, policy.step, policy._run = config, None, 1, Path("unset")
    policy._opened = OpenedPolicy("name", policy_alone(config, ""), {}, 1)
    monkeypatch.setattr(
        api, "sample_groups", lambda policy, *arguments, **names: calls.append((policy, arguments, names)) or []
    )
    monkeypatch.setattr(
        api, "sampled_rows", lambda config, opened, *task: calls.append((config, *task)) or pd.DataFrame()
    )
    monkeypatch.setattr(api, "results", lambda rows, pairs: {})
    return policy, calls


def test_calls_honor_their_keys_and_refuse_others(opened):
    policy, calls = opened
    with one_device():
        policy.sample(["1+2="], 2, stop=["0", "1"], max_completion_tokens=5, temperature=0.5)
        policy.sample("1+2=")
        policy.evaluate(problems=4, samples=3)
        policy.sample("1+2=", temperature=0, top_k=3)
    (sampler, arguments, options), (plain, _, _), (config, prompts, _), (_, _, greedy) = calls
    assert greedy["sampling"] == Sampling(0.0)
    ids = [policy._opened.policy.tokenizer.convert_tokens_to_ids(text) for text in "01"]
    assert sampler.stop_ids == (*plain.stop_ids, *ids)
    assert arguments[3] == 2 and options["max_tokens"] == 5 and options["sampling"].temperature == 0.5
    assert config.evaluation.samples == 3 and len(prompts.texts) == 4
    for value in (-1, 0.001):
        with pytest.raises(ValueError, match=f"temperature = {value}: takes a number, 0.01 or more"):
            policy.sample("1+2=", temperature=value)
    for call in (policy.sample, lambda prompts: policy.score(prompts, ["3", "3"])):
        with pytest.raises(ValueError, match="prompt 1: message 0: content = 3: takes text"):
            call(["1+2=", [{"role": "user", "content": 3}]])
    refused = {
        "group_size": 3,
        "max_prompt_tokens": 2,
        "long_prompts": "drop",
        "slots": 1,
        "engine": "http://127.0.0.1:1",
    }
    for name, value in refused.items():
        with pytest.raises(
            ValueError, match=rf"{name} = .*: has no effect here \(.*\); this call takes max_completion_"
        ):
            policy.sample(["1+2="], **{name: value})
    with pytest.raises(ValueError, match="`samples` is the number of completions"):
        policy.sample(["1+2="], group_size=3)
    with pytest.raises(ValueError, match="temprature = 1: .*did you mean 'temperature'"):
        policy.score(["1+2="], ["3"], temprature=1)
    for name, value in {"every": 3, "initial_kl": True, "max_completion_tokens": 3}.items():
        with pytest.raises(ValueError, match=f"{name} = .*: has no effect here .*samples, temperature"):
            policy.evaluate(**{name: value})
    with pytest.raises(ValueError, match="stop string '12': must be exactly one token"):
        policy.sample(["1+2="], stop=["12"])


def test_evaluation_rows_need_the_rewards_columns(opened):
    policy, calls = opened
    rows = [{"prompt": "1+2=", "level": 1}, {"prompt": "3+4=", "level": 2}]
    with one_device():
        policy.evaluate(rows, reward=lambda completions, level: [1.0] * len(level))
    (_, prompts, task), *_ = calls
    assert prompts.texts == ["1+2=", "3+4="] and task.reward.columns == ("level",) and task.reward.answer is None
    with pytest.raises(ValueError, match="no problem has a column 'hint'; it can take prompts, completions, level"):
        policy.evaluate(rows, reward=lambda completions, hint: [])
    with pytest.raises(ValueError, match="problems: row 0: no 'answer'"):
        policy.evaluate(rows)


# --- The policy, with real programs.

SCRIPT = """
import asyncio
import json
import sys

import numpy as np

from recjax import open_run, run

values, rows, digits = json.loads(sys.argv[1]), json.loads(sys.argv[2]), "0123456789"
reward = lambda prompts, completions, answers: [sum(one in digits for one in text) / 3 for text in completions]


async def cell():
    return run(values, problems=rows, reward=reward, on_step=lambda row: row["step"] == 2)


print(repr(asyncio.run(cell())))  # a notebook runs cells in such a loop
result = asyncio.run(cell())  # on_step saw the row before, so the run goes to its end
print(repr(result))
policy, prompts = result.policy, ["1+2=", "3+4=", "9+9="]
completions = policy.sample(prompts, 2, seed=3)
assert policy.sample([]) == [] and policy.score([], []) == []
for ask in (lambda: policy.sample(prompts, 0), lambda: policy.sample(prompts, 1.5), lambda: policy.score(prompts, [])):
    try:
        ask()
        raise AssertionError("accepted")
    except ValueError as error:
        assert "takes a whole number from 1" in str(error) or "3 prompts and 0 completions" in str(error), error
stopped = policy.sample(prompts, 2, seed=3, stop=list(digits))
for one, whole in zip(stopped, completions):  # the text is that before the stop token
    first = next((place for place, character in enumerate(whole.text) if character in digits), None)
    assert one.text == whole.text[:first], (one.text, whole.text)
assert any(one.text != whole.text for one, whole in zip(stopped, completions))
assert [one.text for one in completions] == [one.text for one in policy.sample(prompts, 2, seed=3)]
scored = policy.score([prompt for prompt in prompts for _ in range(2)], completions)
for one, logprobs in zip(completions, scored):
    np.testing.assert_allclose(logprobs, one.rows[0].behavior_logprobs, atol=1e-4)
assert len(policy.score(["1+2="], ["30"])[0]) == 3  # with the end token
numbers, table = policy.evaluate(samples=2)
after = [json.loads(line) for line in (result.folder / "samples" / "after.jsonl").open()]
assert len(table) == 20 and set(table["prompt"]) == {row["prompt"] for row in after}
ones, _ = open_run(result.folder).best.evaluate(rows[:5], lambda prompts, completions, answers: [1.0] * len(answers))
assert ones["metrics"]["reward"]["value"] == 1 and ones["problems"] == 5
try:
    open_run(result.folder).policy.evaluate()
except ValueError as error:
    print(error)
print(sorted(path.name for path in policy.export("model").iterdir()))
"""


@pytest.mark.slow
def test_a_script_needs_no_guard_or_free_loop(tmp_path):
    (tmp_path / "own.py").write_text(SCRIPT)
    training = VALUES["training"] | {"keep_best": "evaluation/accuracy"}
    values = VALUES | {"output": "runs/own", "training": training, "grading": {"seconds": 20.0}}
    line = [sys.executable, "own.py", json.dumps(values), json.dumps(ROWS)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "of 7 steps" in done.stdout and "7 of 7 steps" in done.stdout
    assert "task.reward = 'python:lambda#" in done.stdout and "pass it again as reward=" in done.stdout
    assert "model.safetensors" in done.stdout and "README.md" in done.stdout
    assert not list((tmp_path / "runs").glob("**/*.partial"))
