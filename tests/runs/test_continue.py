"""A run that continues another run in a new folder, and a run that resumes with other settings."""

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.config import TrainingConfig, load_config
from recjax.models.trainable import combine, flatten, is_adapter
from recjax.planning.dry_run import dry_run
from recjax.runs import checkpoint, policies
from recjax.runs.folder import check_run_folder, open_run_folder
from recjax.runs.policies import open_policy
from recjax.runs.resolve import resolve_config, resolve_start
from recjax.runs.spec import check_weights, spec_of
from recjax.runs.start import begin
from recjax.runs.stored_runs import base_policy
from tests.training.counting import count
from tests.training.tiny_run import TINY, one_device, train

LORA = "model.lora={rank: 2, alpha: 8, targets: [query, down]}"
KL = "algorithm.reference_kl={coefficient: 0.1}"
LETTERS = "task={arithmetic: {problems: ['1..9 - 1..9'], template: 'x{a}{op}{b}='}}"


def begun(config):
    """The run and the state before its first step, from a config as a user gives it."""
    with one_device():
        run, state = begin(spec_of(resolve_config(config, overwrite=False)), overwrite=False)
    run.manager.close()
    return run, state


def trained(config, step=4, accuracy=None):
    """Writes a checkpoint as if the run had made steps: random parameters and moments, and counts of 4."""
    run, state = begun(config)
    random = np.random.default_rng(step)

    def moved(leaf):
        drawn = random.normal(1, 0.1, leaf.shape).astype(np.float32)
        return jnp.full((), 4, jnp.int32) if leaf.dtype == jnp.int32 else leaf + drawn

    state = state._replace(step=step, trained=jax.tree.map(moved, state.trained))
    folder = Path(config.output)
    manager = checkpoint.open_checkpoints(folder / "checkpoints")
    checkpoint.save(manager, state, TrainingConfig(keep_checkpoints=9))
    manager.close()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "evaluation/accuracy": accuracy}) + "\n")
    return run, state


def same(ours, theirs):
    """Whether two trees are equal, to the last bit."""
    ours, theirs = flatten(ours), flatten(theirs)
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[key], theirs[key]) for key in ours)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The folder of a run with a checkpoint, which no test changes."""
    folder = tmp_path_factory.mktemp("first")
    (folder / "tiny.yaml").write_text(TINY)
    return trained(load_config(folder / "tiny.yaml", [f"output={folder / 'first'}"]))[0].setup.config.output


def continued(tiny, name, *overrides):
    """The config of a run that continues the run `first`."""
    first = tiny("first").output
    return tiny(name, f"model.run={first}", "model.decoder=null", *overrides)


def test_continued_run_starts_with_weights_and_moments(tiny):
    _, before = trained(tiny("first"))
    run, after = begun(continued(tiny, "second", "optimizer.learning_rate=0.5", KL, "algorithm.preset=grpo"))
    assert after.step == after.version == 0
    assert same(after.trained.params, before.trained.params) and same(run.learner.reference, before.trained.params)
    (_, (adam, _, schedule)), (_, (old, _, _)) = after.trained.optimizer_state, before.trained.optimizer_state
    assert same(adam.mu, old.mu) and same(adam.nu, old.nu)
    assert adam.count == 4 and schedule.count == 0, "the schedule is that of the new run"
    _, fresh = begun(continued(tiny, "fresh", "optimizer.state=new"))
    assert same(fresh.trained.params, before.trained.params)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(fresh.trained.optimizer_state))


def test_a_run_begins_with_the_momentum_of_another(tiny):
    momentum = "optimizer={name: sgd, options: {momentum: 0.9}}"
    _, before = trained(tiny("first", momentum))
    _, after = begun(continued(tiny, "second", momentum))
    (_, (momentum, _), updates), (_, (old, _), _) = after.trained.optimizer_state, before.trained.optimizer_state
    assert same(momentum.trace, old.trace)
    assert updates.count == 0, "the schedule is that of the new run"


def test_constant_teacher_is_the_initial_policy(tiny):
    teacher = ["model.teacher=policy", "task.teacher_template={answer}={prompt}", "task.teacher_tokens=8"]
    teacher += ["algorithm.teacher_divergence.coefficient=0.5"]
    _, before = trained(tiny("first", *teacher, "model.teacher_rate=0.1"))
    _, constant = begun(continued(tiny, "constant", *teacher, "model.teacher_rate=0"))
    (_, (adam, _, _), averaged), (_, (old, _, _), average) = (
        state.trained.optimizer_state for state in (constant, before)
    )
    assert same(averaged.average, before.trained.params) and not same(average.average, before.trained.params)
    assert same(adam.mu, old.mu)
    _, moving = begun(continued(tiny, "moving", *teacher, "model.teacher_rate=0.2"))
    assert same(moving.trained.optimizer_state[2].average, average.average)


def test_a_run_continues_with_or_without_an_average(tiny):
    teacher = ["model.teacher=policy", "algorithm.teacher_divergence.coefficient=0.5", "model.teacher_rate=0.1"]
    _, before = trained(tiny("first"))
    _, after = begun(continued(tiny, "second", *teacher))
    (_, (adam, _, _), averaged), (_, (old, _, _)) = (state.trained.optimizer_state for state in (after, before))
    assert same(averaged.average, before.trained.params) and same(adam.mu, old.mu)
    _, before = trained(tiny("taught", *teacher))
    options = [f"model.run={tiny('taught').output}", "model.decoder=null"]
    (_, (adam, _, _)), (_, (old, _, _), _) = (
        state.trained.optimizer_state for state in (begun(tiny("third", *options))[1], before)
    )
    assert same(adam.mu, old.mu)


def test_start_stays_when_the_other_run_trains_on(tiny):
    _, before = trained(tiny("first"), 4)
    second = continued(tiny, "second")
    begun(second)
    trained(tiny("first"), 5)
    assert same(begun(second)[1].trained.params, before.trained.params)
    assert resolve_config(second, overwrite=False).model.run.endswith("first/checkpoints/4")
    assert resolve_start(continued(tiny, "third")).model.run.endswith("first/checkpoints/5")
    open_run_folder(spec_of(second), overwrite=False)  # as the user gives it again
    other = continued(tiny, "second")
    other = other.model_copy(update={"model": other.model.model_copy(update={"run": f"{second.model.run}x"})})
    with pytest.raises(ValueError, match="run of another config"):
        open_run_folder(spec_of(other), overwrite=False)


@pytest.mark.parametrize("key", ["teacher", "reference"])
def test_other_model_stays_when_its_run_trains_on(tiny, key):
    _, before = trained(tiny("first"), 4)
    changes = {"teacher": ["algorithm.preset=on_policy_distillation"], "reference": [KL, "algorithm.preset=grpo"]}[key]
    config = tiny("second", f"model.{key}={tiny('first').output}", *changes)

    def params():
        learner = begun(config)[0].learner
        return learner.teacher.params if key == "teacher" else learner.reference

    assert same(params(), before.trained.params)
    trained(tiny("first"), 5)
    assert same(params(), before.trained.params)
    check_run_folder(config, overwrite=False)  # as the user gives it again
    shutil.rmtree(Path(tiny("first").output) / "checkpoints" / "4")
    with pytest.raises(ValueError, match=f"model.{key} = .*: step 4: .*holds the steps 5"):
        begun(config)


def test_changed_weights_are_refused_or_named_at_a_resume(tiny, caplog):
    config = tiny("run", "model.decoder=null", "model.path=folder")
    names = {checkpoint.BASE: "old", "model.teacher (float32)": "old"}
    check_weights(config, names, names | {"model.reference (float32)": "new"}, True)
    with pytest.raises(ValueError, match="model.teacher .float32.: the weights changed .*old then, new now"):
        check_weights(config, names, {"model.teacher (float32)": "new"}, True)
    with pytest.raises(ValueError, match="initial policy: the weights changed"):
        check_weights(config, names, {checkpoint.BASE: "new"}, True)
    assert not caplog.text
    check_weights(config, names, {checkpoint.BASE: "new"}, False)
    random_weights = tiny("run")  # which may be rounded
    check_weights(random_weights, names, {checkpoint.BASE: "new"}, True)
    assert caplog.text.count("initial policy: the weights changed") == 2


def test_a_record_has_the_digest_of_the_initial_policy(tiny):
    first, other = (
        tiny("run", f"output={tiny(name).output}", *changes)
        for name, *changes in (("first", "optimizer.learning_rate=0.5", LORA), ("other", "seed=1"))
    )
    second = tiny("second")
    for config in (first, second, other):
        begun(config)
    digests = [base_policy(Path(config.output)) for config in (first, second, other)]
    assert digests[0] == digests[1] != digests[2] and None not in digests


def test_the_best_checkpoint_is_that_of_the_highest_accuracy(tiny):
    states = [trained(tiny("first"), step, accuracy)[1] for step, accuracy in ((4, 0.2), (5, 0.6), (6, 0.6))]
    folder = f"{tiny('first').output}/checkpoints"
    second = tiny("second", f"model.run={folder}/best", "model.decoder=null")
    assert resolve_start(second).model.run == f"{folder}/5"
    assert same(open_policy(Path(tiny("first").output), step="best").params, states[1].trained.params)
    with one_device():
        assert same(open_policy(f"{folder}/best", second).params, states[1].trained.params)


@pytest.mark.slow
def test_another_task_has_the_alphabet_of_the_first(tiny):
    run, _ = trained(tiny("first"))
    digits = "task.arithmetic={problems: ['4..9 + 4..9'], template: '{a}{op}{b}='}"
    second, _ = begun(continued(tiny, "second", digits))
    assert second.setup.policy.tokenizer.get_vocab() == run.setup.policy.tokenizer.get_vocab()
    assert "1" in second.setup.config.model.decoder.characters and second.setup.train.texts != run.setup.train.texts
    # What runs with it reads its own config.yaml alone, and plans are made with its shape.
    assert dry_run(continued(tiny, "planned", digits)).model.decoder.config == second.setup.policy.decoder.config
    with pytest.raises(ValueError, match="outside the tokenizer's vocabulary"):
        begun(continued(tiny, "third", LETTERS))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.run=nowhere"], "'nowhere': holds no config.yaml"),
        (["model.run={first}/checkpoints/3"], "step 3: .*holds the steps 4"),
        (["model.run={first}/checkpoints/best"], "best: metric 'evaluation/accuracy' .* no checkpoint's step has it"),
        ([f"{LORA}"], r"model.run = .* trained other parameters \(model.lora.*optimizer.state=new"),
        (["optimizer.name=sgd"], r"optimizer.name = 'sgd': model.run = .* with 'adamw'.*optimizer.state=new"),
        (["model.freeze=[embedding]"], r"model.run = .* trained other parameters \(model.freeze"),
        (["model.decoder={hidden_size: 32}"], r"has another model \(decoder.hidden_size: 16 there, 32 now"),
        (["model.reference={first}"], "model.reference = .*reads no reference policy"),
        (["warm_start={}"], "model.run.*does not work with warm_start"),
    ],
)
def test_what_does_not_fit_is_refused_before_work_starts(tiny, first, overrides, words):
    overrides = [text.replace("{first}", first) for text in overrides]
    with pytest.raises(ValueError, match=words):
        resolve_start(tiny("second", f"model.run={first}", "model.decoder=null", *overrides))


@pytest.mark.slow
def test_adapters_stay_adapters_or_are_merged(tiny):
    run, before = trained(tiny("first", LORA))
    whole = open_policy(Path(run.setup.config.output)).params
    again, state = begun(continued(tiny, "second", LORA))
    assert same(combine(state.trained.params, again.learner.frozen), combine(before.trained.params, run.learner.frozen))
    other = LORA.replace("rank: 2", "rank: 4")
    third, state = begun(continued(tiny, "third", other, "optimizer.state=new"))
    params = combine(state.trained.params, third.learner.frozen)
    assert same({path: leaf for path, leaf in flatten(params).items() if not is_adapter(path)}, flatten(whole))
    assert third.setup.policy.decoder.config.lora.rank == 4
    # A run's whole policy is made again from the runs before it.
    trained(continued(tiny, "third", other, "optimizer.state=new"), 2)
    merged = open_policy(Path(third.setup.config.output)).params
    assert flatten(merged).keys() == flatten(whole).keys() and not same(merged, whole)
    merged["embedding"], whole["embedding"] = {}, {}
    assert same(merged["norm"], whole["norm"]), "adapters change projections alone"


@pytest.mark.slow
def test_the_reference_is_another_policy(tiny):
    _, before = trained(tiny("first"))
    run, state = begun(tiny("second", KL, f"model.reference={tiny('first').output}", "evaluation.initial_kl=true"))
    assert same(run.learner.reference, before.trained.params) and same(run.learner.initial, state.trained.params)
    run, state = begun(tiny("third", KL, LORA, f"model.reference={tiny('first').output}"))
    assert run.learner.initial is None
    assert flatten(run.learner.reference).keys() == flatten(combine(run.learner.frozen, state.trained.params)).keys()
    wide = "model.decoder.hidden_size=32"
    with pytest.raises(ValueError, match="model.reference = .*its shape or tokenizer differs"):
        begun(tiny("fourth", KL, wide, f"model.reference={tiny('first').output}"))


def test_named_settings_may_change_at_a_resume(tiny):
    count(tiny("run", "training.steps=3"))
    refused = "optimizer.learning_rate: 0.01 there, 0.5 now"
    with pytest.raises(ValueError, match=rf"{refused}.*training.resume_with=\[optimizer.learning_rate\] to resume"):
        count(tiny("run", "optimizer.learning_rate=0.5"))
    schedule = "optimizer.schedule={name: cosine_decay_schedule, alpha: 0.1}"
    for changed in ("algorithm.clip.epsilon_high=0.5", schedule):
        names = ",".join(sorted(["optimizer.beta1", changed.partition("=")[0]]))
        with pytest.raises(ValueError, match=re.escape(f"training.resume_with=[{names}]")):
            count(tiny("run", "training.steps=3", "optimizer.beta1=0.5", changed))
    with pytest.raises(ValueError, match="give another output=…, or --overwrite"):
        count(tiny("run", "optimizer.learning_rate=0.5", "seed=7"))
    other = "training.resume_with=[optimizer.learning_rate]"
    both = r"resume_with=\[optimizer.learning_rate,optimizer.weight_decay\]"
    with pytest.raises(ValueError, match=f"weight_decay: 0.0 there, 0.5 now.*{both}"):
        count(tiny("run", "optimizer.learning_rate=0.5", "optimizer.weight_decay=0.5", other))
    with pytest.raises(ValueError, match="training.resume_with = .*'seed' cannot change; takes optimizer.learn"):
        tiny("run", "training.resume_with=[seed]")
    for changed in ("optimizer.name=sgd", "optimizer.options={mu_dtype: bfloat16}"):
        with pytest.raises(ValueError, match="give another output=…, or --overwrite"):
            count(tiny("run", "training.steps=3", changed))
    config = tiny("run", "optimizer.learning_rate=0.5", other)
    rows = count(config)
    assert [row["step"] for row in rows] == list(range(8))
    first, second = json.loads((Path(config.output) / "environment.json").read_text())
    assert "changed" not in first
    assert second["changed"] == {"after_step": 3, "settings": "optimizer.learning_rate: 0.01 there, 0.5 now"}
    assert "learning_rate: 0.5" in (Path(config.output) / "config.yaml").read_text()


def test_checkpoints_from_before_a_change_are_read_after_it(tiny):
    trained(tiny("run"))
    changed = ["algorithm.clip.epsilon_high=0.5", "training.resume_with=[algorithm.clip.epsilon_high]"]
    open_run_folder(spec_of(tiny("run", *changed)), overwrite=False)
    assert open_policy(Path(tiny("run").output)).version == 4
    with pytest.raises(ValueError, match="epsilon_high"):
        open_run_folder(spec_of(tiny("run")), overwrite=False)


@pytest.mark.slow
def test_a_continued_run_trains_with_its_own_schedule(tiny):
    train(tiny("first", "training.steps=4"))
    schedule = "optimizer.schedule={name: linear_schedule, end_value: 0.0}"
    second = continued(tiny, "second", schedule, "optimizer.learning_rate=0.02", "algorithm.preset=grpo", KL)
    rows = train(second)
    np.testing.assert_allclose([row["learning_rate"] for row in rows[1:]], [0.02 * (7 - i) / 7 for i in range(7)], 1e-5)
    other = continued(tiny, "other", schedule, "optimizer.learning_rate=0.02", "optimizer.state=new")
    assert train(other)[1]["learning_rate"] == pytest.approx(0.02)


def test_deleted_checkpoint_is_replaced_during_the_read(tiny, monkeypatch):
    trained(tiny("first"), 4)
    _, newest = trained(tiny("first"), 5)
    folder = Path(tiny("first").output) / "checkpoints"
    restored = policies.read_trained

    def gone(run, step, like):
        if step == 4:
            shutil.rmtree(folder / "4")
            raise FileNotFoundError(folder / "4")
        return restored(run, step, like)

    steps = iter((4, 5))
    whole = policies.whole_step
    monkeypatch.setattr(policies, "read_trained", gone)
    monkeypatch.setattr(policies, "whole_step", lambda run, config, step: whole(run, config, next(steps)))
    assert same(open_policy(tiny("first").output).params, newest.trained.params)
    monkeypatch.setattr(policies, "whole_step", whole)
    monkeypatch.setattr(
        policies, "read_trained", lambda run, step, like: shutil.rmtree(folder / "5") or restored(run, step, like)
    )
    with pytest.raises(ValueError, match="checkpoints/5: the run deleted this checkpoint during the read"):
        open_policy(tiny("first").output, step=5)
