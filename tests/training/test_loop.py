"""The real loop, small: regimes, on-policy ratios, resume, failures."""

import contextlib
import json
import signal
import subprocess
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.config import load_config
from recjax.logs.metrics import read_metrics
from recjax.models import unrolling
from recjax.models.decoder import logits
from recjax.models.logprobs import last_hidden
from recjax.runs import compile_ahead, start, stopping
from recjax.runs.folder import open_run_folder
from recjax.runs.prepare import prepare
from recjax.runs.spec import spec_of
from recjax.sources import sampling
from recjax.training import learner, loop
from recjax.training.evaluation import evaluate_policy
from recjax.training.schedule import expected_staleness
from tests.closeness import assert_close
from tests.commands import Command
from tests.experience.rows import read_columns
from tests.marks import slow
from tests.training.counting import CountingLearner, Interrupted, count, prepared_batch, sampled_by
from tests.training.tiny_run import one_device, train, train_until_killed, without_figures, without_times

REGIMES = {
    "on_policy": [],
    "interval": ["regime.sync_interval=4"],
    "offset": ["regime.sync_offset=2"],
    "both": ["regime.sync_interval=3", "regime.sync_offset=2"],
    "offline": ["regime.offline=true"],
}
WITHOUT_PAUSES = ["training.checkpoint_every=400", "evaluation.every=0"]


CUT = ["rollout.temperature=0.7", "rollout.top_k=6", "rollout.top_p=0.9"]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [["rollout.min_p=0.1"], []])
def test_at_staleness_zero_the_ratio_is_one(tiny, sampling):
    assert_ratios_are_one(train(tiny("run", "training.steps=3", "evaluation.every=0", *sampling)), sampling)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "threads"),
    [
        ([], ["compile the update"]),
        (["training.tokens_per_micro_batch=64"], ["compile the update"]),
        (["rollout.top_k=3"], ["MainThread"]),  # sets of tokens are recorded, whose shapes the samples decide
        (["training.minibatches=2"], ["MainThread"]),
    ],
    ids=["padded", "packed", "sets", "minibatches"],
)
def test_update_of_known_shapes_is_compiled_ahead(tiny, options, threads):
    with compilations() as compiled:
        train(tiny("run", "training.steps=2", "evaluation.every=0", *options))
    assert [thread for name, thread in compiled if name == "jit(update)"] == threads


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cores", "options"),
    [
        (2, ["training.tokens_per_micro_batch=64", "regime.sync_interval=2"]),
        (2, ["model.dtype=bfloat16"]),
        (8, []),
        (8, ["model.lora.rank=2", "model.dtype=bfloat16", "rollout.top_k=3"]),
    ],
)
def test_large_programs_are_compiled_in_parallel(tiny, monkeypatch, cores, options):
    """Evaluations and batches have the same shapes here, and all steps the same as the first."""
    monkeypatch.setattr(compile_ahead, "cores", lambda: cores)
    monkeypatch.setattr(unrolling, "LEAST_WEIGHTS", 0)
    is_cut = "rollout.top_k=3" in options  # evaluation and sampler then have programs of their own
    with compilations() as compiled:
        train(tiny("run", "training.steps=3", "evaluation.every=2", "evaluation.samples=4", *options))
    threads = {}
    for name, thread in compiled:
        threads.setdefault(name, []).append(thread)
    by_cores = "MainThread" if cores == 2 else "compile ahead"
    assert threads["jit(prefill)"] == [by_cores]
    for name in ("first_tokens", "decode"):
        assert threads[f"jit({name})"] == [by_cores] * (1 + is_cut)
    assert len(threads["jit(update)"]) == len(threads["jit(_learning_rates)"]) == 1


@contextlib.contextmanager
def compilations():
    """Name and thread of each program that JAX compiles from here on, also of programs that other tests compiled."""
    compiled = []

    def heard(event, seconds, fun_name="", **_):
        if event.endswith("backend_compile_duration"):
            compiled.append((fun_name, threading.current_thread().name.rpartition("_")[0] or "MainThread"))

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        jax.clear_caches()
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)


def assert_ratios_are_one(rows, sampling):
    for row in rows[1:]:
        assert row["staleness"] == 0 and row.get("tokens_without_set") == (0 if sampling else None)
        for quantile in ("ratio/q01", "ratio/q50", "ratio/q99", "ratio/max"):
            np.testing.assert_allclose(row[quantile], 1.0, atol=1e-4)
    assert any(row["gradient_norm"] > 0 for row in rows[1:])


@pytest.mark.slow
def test_a_log_prob_of_another_temperature_is_noticed(tiny, monkeypatch):
    sample_groups = sampling.sample_groups

    def at_another_temperature(*args, sampling, **options):
        return sample_groups(*args, sampling=sampling._replace(temperature=0.8), **options)

    monkeypatch.setattr(sampling, "sample_groups", at_another_temperature)
    rows = train(tiny("run", "training.steps=1"))
    assert abs(rows[1]["ratio/q99"] - 1) > 1e-3


@pytest.mark.slow
def test_initial_kl_starts_at_zero(tiny):
    config = tiny("run", "evaluation.initial_kl=true", "evaluation.problems=8", "evaluation.samples=256")
    config_rows = train(config)
    measured = [row["evaluation/initial_kl"] for row in config_rows if "evaluation/initial_kl" in row]
    assert abs(measured[0]) < 1e-5 and measured[-1] > 0.01

    # KL(π ‖ π_0) of the first token, exactly, against what samples of one token give.
    made, initial = prepare(config)
    moved = jax.tree.map(lambda x: x * 1.3, initial)

    def first(params):
        tokens, mask = jnp.asarray(asked.tokens), jnp.asarray(asked.mask)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _ = made.policy.decoder.apply({"params": params}, tokens, positions, mask)
        return jax.nn.log_softmax(logits(made.policy.decoder.config, params, last_hidden(hidden, mask)))

    asked = made.held_out
    one_token = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_completion_tokens": 1})})
    with made.grading:
        sampled = evaluate_policy(one_token, made.policy, moved, asked, made.grading, 0, initial).initial_kl
    exact = np.mean(np.sum(np.exp(first(moved)) * (first(moved) - first(initial)), axis=-1))
    np.testing.assert_allclose(sampled, exact, rtol=0.15)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("updates", [*slow(1), 2])
def test_the_staleness_of_each_regime_is_the_papers(tiny, regime, updates):
    options = [f"training.updates_per_batch={updates}", "training.steps=13", *WITHOUT_PAUSES]
    config = tiny("run", *REGIMES[regime], *options)
    rows = count(config)
    expected = [expected_staleness(step, config.regime, updates) for step in range(1, 14)]
    assert [row["staleness"] for row in rows[1:]] == expected


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("updates", [1, *slow(3)])
def test_the_sampler_uses_the_weights_of_its_version(tiny, regime, updates):
    used, options = [], [f"training.updates_per_batch={updates}", f"training.steps={7 * updates}", *WITHOUT_PAUSES]

    def sampled(sampler, params, version, number):
        used.append((version, float(params["checksum"][0])))
        return prepared_batch(sampler, params, version, number)

    rows = count(tiny("run", *REGIMES[regime], *options), sample=sampled)
    after = {0: 0.0} | {row["step"]: row["loss"] for row in rows[1:]}  # the loss is the checksum after the step
    assert used == [(version, after[version]) for version, _ in used] and len(used) >= 7


@pytest.fixture
def at_a_terminal():
    """Ctrl-C and hanging up interrupt, which they do not if the tests run in a shell's background or under nohup."""
    before = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, action) for number, action in before.items()}
    yield
    for number, action in before.items():
        signal.signal(number, action)


@pytest.mark.usefixtures("at_a_terminal")
@pytest.mark.parametrize("number", [signal.SIGTERM, *slow(signal.SIGINT, signal.SIGHUP)])
@pytest.mark.parametrize("updates", [*slow(1), 3])  # of three updates, the fifth step is in the middle of a batch
def test_stopped_run_finishes_its_step_and_resumes(tiny, number, updates):
    options = ["regime.sync_interval=3", "regime.sync_offset=2", f"training.updates_per_batch={updates}"]
    options += WITHOUT_PAUSES
    raises = Interrupted(5, lambda: signal.raise_signal(number))
    with pytest.raises(loop.Preempted, match="stopped after step 5; the same command or call resumes") as stopped:
        count(tiny("stopped", *options), raises)
    assert stopped.value.signal == number
    assert (Path(tiny("stopped").output) / "checkpoints" / "5").is_dir()
    report = (Path(tiny("stopped").output) / "report.html").read_text()
    assert "stopped after step 5; the same command or call resumes" in report and "5 of 7" in report
    assert without_times(count(tiny("stopped", *options))) == without_times(count(tiny("straight", *options)))


@pytest.mark.usefixtures("at_a_terminal")
def test_a_second_ctrl_c_ends_at_once(tiny):
    with pytest.raises(KeyboardInterrupt):
        count(tiny("stopped"), Interrupted(1, lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)]))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])  # in a shell's background, and under nohup
def test_ignored_signals_stay_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with stopping.stop_requests() as received:
            signal.raise_signal(number)
            assert received == [] and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(number, before)


@pytest.mark.slow
def test_settings_without_effect_on_numbers_may_change(tiny):
    memory = ["training.micro_batch_prompts=1", "model.remat=full", "model.logprob_chunk=2", "rollout.slots=3"]
    evaluation = ["evaluation.every=2", "evaluation.problems=3", "evaluation.samples=2", "evaluation.initial_kl=true"]
    packed = ["training.tokens_per_micro_batch=16", "model.attention=plain", "evaluation.temperature=0.5"]
    steps = "training.steps=6", "training.checkpoint_every=5"
    straight = train(tiny("straight", *steps))
    for name, changes in (("stopped [x] *?", [*memory, *evaluation]), ("packed #1", packed)):
        train_until_killed(tiny(name, *steps), at=6)
        resumed = train(tiny(name, *steps, *changes))  # one step, from the other run's state
        for found, expected in zip(resumed, straight, strict=True):
            for key in ("step", "reward", "completion_length", "loss", "gradient_norm", "update_norm", "ratio/q01"):
                assert_close(found.get(key, 0), expected.get(key, 0), 1e-3, least=0.01, err_msg=f"{name}: {key}")


@pytest.mark.slow
def test_steps_without_data_keep_the_learning_rate(tiny, monkeypatch):
    pads, calls = loop.to_learn_from, []

    def masks_step_three(batch, task):
        calls.append(1)
        batch = pads(batch, task)
        return batch._replace(completion_mask=batch.completion_mask & (len(calls) != 3))

    monkeypatch.setattr(loop, "to_learn_from", masks_step_three)
    options = ["optimizer={schedule: linear, weight_decay: 0.1}", "training.steps=5", "evaluation.every=0"]
    rows = train(tiny("run", *options))
    rates = [row["learning_rate"] for row in rows[1:]]
    np.testing.assert_allclose(rates, [0.01, 0.008, 0.008, 0.006, 0.004], rtol=1e-5)
    assert rows[3]["update_norm"] == 0 and all(row["update_norm"] > 0 for row in rows[1:3] + rows[4:])


@pytest.mark.slow
def test_run_resumes_from_the_checkpoint_of_sigterm(tiny, tmp_path):
    options = ["regime.sync_interval=3", "regime.sync_offset=2", "training.steps=400", "training.checkpoint_every=400"]
    config = tiny("stopped", *options)
    command = ["-m", "recjax.train", "--config", tmp_path / "tiny.yaml", *options, f"output={config.output}"]
    process = Command(command, stderr=subprocess.PIPE)
    metrics = Path(config.output) / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while len(read_metrics(metrics)) < 15 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = process.communicate()[1]
    assert process.returncode == 128 + signal.SIGTERM
    done = read_metrics(metrics)[-1]["step"]
    assert 13 < done < 400 and f"stopped after step {done};" in said and "Traceback" not in said
    assert (Path(config.output) / "checkpoints" / str(done)).is_dir()
    options[2] = f"training.steps={done + 6}"
    resumed, straight = train(tiny("stopped", *options)), train(tiny("straight", *options))
    # The last step is evaluated because it is the last, wherever that is.
    assert without_times(resumed) == without_times(straight)


def test_run_activates_its_mesh_unless_one_is_active(tiny):
    class Watching(CountingLearner):
        def begin(self, *arguments, **others):
            meshes.append(dict(jax.sharding.get_mesh().shape))
            return super().begin(*arguments, **others)

    meshes, sizes = [], {"data": 2, "fsdp": 2, "tensor": 1}
    options = {"learner": Watching(), "sources": sampled_by(prepared_batch)}
    with without_figures():
        start.train(tiny("own", "training.steps=1", "mesh={data: 2, fsdp: 2}"), **options)
    assert jax.sharding.get_mesh().empty
    with one_device(), without_figures():
        start.train(tiny("given", "training.steps=1", "mesh={data: 2, fsdp: 2}"), **options)
    assert meshes == [sizes, {"data": 1, "fsdp": 1, "tensor": 1}]


def test_a_finished_run_goes_on_when_given_more_steps(tiny):
    count(tiny("longer", "training.steps=3"))
    assert without_times(count(tiny("longer"))) == without_times(count(tiny("straight")))


def test_a_finished_or_other_run_is_not_touched(tiny):
    config = tiny("run", "training.steps=1")
    count(config)
    with pytest.raises(ValueError, match="finished run of 1 steps"):
        open_run_folder(spec_of(config), overwrite=False)
    with pytest.raises(ValueError, match="optimizer.learning_rate: 0.01 there, 0.5 now"):
        open_run_folder(spec_of(tiny("run", "optimizer.learning_rate=0.5")), overwrite=False)
    assert (Path(config.output) / "summary.json").exists()
    open_run_folder(spec_of(config), overwrite=True)
    assert not (Path(config.output) / "summary.json").exists()


def test_foreign_folder_is_refused_even_with_overwrite(tiny):
    with pytest.raises(ValueError, match="output = .*a checkpoint cannot be read"):
        open_run_folder(spec_of(tiny("back\\slash")), overwrite=False)
    config = tiny("thesis")
    Path(config.output).mkdir()
    (Path(config.output) / "chapter.tex").write_text("years of work")
    with pytest.raises(ValueError, match="not a run .chapter.tex."):
        open_run_folder(spec_of(config), overwrite=True)
    # A config without what only recjax writes is the user's, next to a reward and data.
    (Path(config.output) / "config.yaml").write_text("output: thesis  # mine")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="not a run .chapter.tex, config.yaml."):
            open_run_folder(spec_of(config), overwrite)
    assert (Path(config.output) / "config.yaml").read_text() == "output: thesis  # mine"


def test_overwrite_keeps_files_that_recjax_did_not_write(tiny, caplog):
    config = tiny("run")
    output = open_run_folder(spec_of(config), overwrite=False)
    of_run = ("checkpoints/4/state", "samples/after.jsonl", "experience.db-wal", ".metrics.jsonl.7.partial")
    of_user = ("reward.py", "notes/a.md", "train.jsonl")
    for name in (*of_run, *of_user):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text("content")
    open_run_folder(spec_of(config), overwrite=True)
    assert [name for name in (*of_run, *of_user) if (output / name).exists()] == [*of_user]
    assert "kept what recjax did not write: notes, reward.py, train.jsonl" in caplog.text


def test_infinite_loss_stops_before_the_next_checkpoint(tiny, monkeypatch):
    config = tiny("run")
    update, calls = learner.update, []

    def poisoned_at_step_five(state, *args, **options):
        calls.append(1)
        if len(calls) == 5:
            state = state._replace(params=jax.tree.map(lambda x: x * np.nan, state.params))
        return update(state, *args, **options)

    monkeypatch.setattr(learner, "update", poisoned_at_step_five)
    with pytest.raises(FloatingPointError, match=r"step 5: .*gradient_norm = nan.*checkpoint is of step 3"):
        train(config)
    assert "gradient_norm = nan" in (Path(config.output) / "report.html").read_text()


def test_an_update_that_overflows_stops_the_run(tiny):
    config = tiny("run", "training.checkpoint_every=1")
    # A config file's rate has a bound; this overflows at once.
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"learning_rate": 1e38})})
    with pytest.raises(FloatingPointError, match=r"step 1: update_norm = inf.*checkpoint is of step 0"):
        train(config)


def test_the_run_folder_holds_what_the_readme_says(tiny):
    config = tiny("run")
    with one_device():
        summary = start.train(config)
    output = Path(config.output)
    assert json.loads((output / "summary.json").read_text()) == summary
    assert summary["steps"] == 7 and 0 <= summary["accuracy_before"] <= 1 and summary["peak_memory_bytes"] > 0
    assert {"sample", "score", "update", "evaluate", "checkpoint"} <= summary["seconds"].keys()
    assert summary["wall_seconds"] >= sum(summary["seconds"].values()) * 0.99
    rows = read_metrics(output / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(8))
    assert [row["step"] for row in rows if "evaluation/accuracy" in row] == [0, 3, 6, 7]
    for name in ("before", "after"):
        samples = [json.loads(line) for line in (output / "samples" / f"{name}.jsonl").read_text().splitlines()]
        columns = {
            "step",
            "problem",
            "prompt",
            "question",
            "completion",
            "answer",
            "difficulty",
            "reward",
            "accurate",
            "truncated",
            "ungraded",
            "tokens",
            "reward/length",
            "reward/score",
        }
        assert len(samples) == 10 and samples[0].keys() == columns
    assert (output / "figures" / "training.png").read_bytes().startswith(b"\x89PNG")
    report = (output / "report.html").read_text()
    assert "finished" in report and "training.steps=14" in report, "the command that continues it"
    assert report.count('src="data:image/png;base64,') == 1 and report.count("<article") == 10
    (events,) = (output / "tensorboard").glob("events*")
    assert all(tag in events.read_bytes() for tag in (b"config/text_summary", b"samples/text_summary"))
    assert list((output / "checkpoints").iterdir())
    assert load_config(output / "config.yaml") == config


@pytest.mark.slow
def test_oversampling_keeps_the_shortest_completions(tiny):
    def recorded(name, *options):
        config = tiny(name, "experience.record=true", "training.steps=1", "evaluation.problems=2", *options)
        rows = train(config)
        groups = {}
        for one in read_columns(config.record_file):
            groups.setdefault(one.group_id, []).append(one)
        return rows[-1], groups

    _, whole = recorded("whole", "rollout.group_size=7")
    row, kept = recorded("kept", "rollout.oversample=3")
    lengths = {name: np.array([len(one.completion_tokens) for one in rows]) for name, rows in whole.items()}
    drawn = np.concatenate(list(lengths.values()))
    chosen = []
    for name, rows in kept.items():
        shortest = sorted(np.argsort(lengths[name], kind="stable")[:4])
        assert [one.completion for one in rows] == [whole[name][place].completion for place in shortest]
        chosen.extend(lengths[name][shortest])
    dropped = (drawn.sum() - sum(chosen)) / (len(drawn) - len(chosen))
    assert row["completion_length"] == np.mean(chosen)
    assert row["oversampling/dropped_tokens"] == dropped > np.mean(chosen)
    np.testing.assert_allclose(row["oversampling/length_bias"], np.mean(chosen) / drawn.mean() - 1)


def test_behavior_weights_are_a_copy(tiny):
    learner.update.clear_cache()
    before = learner.update._cache_size()  # below 0 after `jax.clear_caches`
    rows = train(tiny("run", "regime.sync_interval=4"))[1:]
    ratios = [abs(row["ratio/max"] - 1) for row in rows]
    assert ratios[0] < 1e-5 and ratios[4] < 1e-5  # fresh weights
    assert min(ratios[1:4]) > 1e-5  # weights moved on while the sampler's stayed
    assert learner.update._cache_size() == before + 1


def test_seeds_differ_and_no_key_is_reused(tiny, monkeypatch):
    sampled, dropped, sample_groups, update = [], [], sampling.sample_groups, learner.update

    def watched_sampling(policy, params, prompts, keys, *args, **named):
        sampled.extend(map(tuple, keys.tolist()))
        return sample_groups(policy, params, prompts, keys, *args, **named)

    def watched_update(*args, **named):
        dropped.append(tuple(jax.random.key_data(args[3].key).tolist()))
        return update(*args, **named)

    monkeypatch.setattr(sampling, "sample_groups", watched_sampling)
    monkeypatch.setattr(learner, "update", watched_update)
    first, second = train(tiny("a", "training.steps=2")), train(tiny("b", "training.steps=2", "seed=1"))
    assert without_times(first) != without_times(second)
    # One key for each completion of two runs of two steps, and one for each update.
    assert len({*sampled}) == len(sampled) == 2 * 2 * 16 and len({*dropped}) == len(dropped) == 2 * 2


@pytest.mark.parametrize("name", ["k3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("k1", "k2"))])
def test_reference_kl_starts_at_zero_with_ratios_of_one(tiny, name):
    options = [f"algorithm.reference_kl.estimator={name}", "training.steps=3", "evaluation.every=0", *CUT]
    # The coefficient is an argument of the program, so that both runs share one.
    kl, none = "algorithm.reference_kl.coefficient=0.5", "algorithm.reference_kl.coefficient=1e-12"
    with_kl, without = train(tiny("kl", *options, kl)), train(tiny("plain", *options, none))
    np.testing.assert_allclose(with_kl[1]["loss"], without[1]["loss"], atol=1e-5)
    assert abs(with_kl[3]["loss"] - without[3]["loss"]) > 1e-6
    assert_ratios_are_one(with_kl, CUT)


@pytest.mark.slow
def test_nothing_is_compiled_once_a_run_is_under_way(tiny, monkeypatch):
    compiled, update = [], learner.update

    def counted(event: str, duration: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    counts = []

    def watched(*args, **named):
        result = update(*args, **named)
        counts.append(len(compiled))
        return result

    monkeypatch.setattr(learner, "update", watched)
    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(counted)
    try:
        train(tiny("run", "regime.sync_interval=2", "regime.sync_offset=1", "evaluation.every=0"))
    finally:
        jax.monitoring.unregister_event_duration_listener(counted)
    # Whatever comes between one update and the next has come by the third.
    assert counts[0] > 0 and len({*counts[2:]}) == 1
