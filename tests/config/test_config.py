"""The config: what it takes, what it refuses, and what the refusals say."""

import functools
import json
import re
import subprocess
import sys
import typing
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jsonschema
import pydantic
import pytest
import yaml

from recjax.analysis.sweeps import read_sweep
from recjax.config import (
    KEYS,
    ArithmeticTask,
    Attention,
    Config,
    DecoderShape,
    ModelConfig,
    Priority,
    Projection,
    ReasoningGymTask,
    RegimeConfig,
    Remat,
    RolloutConfig,
    TaskConfig,
    load_config,
    make_config,
    stored_values,
    to_yaml,
)
from recjax.config import help as config_help
from recjax.config.experience import EngineConfig
from recjax.config.fields import block_of, choices_of, value_of
from recjax.config.yaml_values import read_yaml, read_yaml_file
from recjax.experience.replay import PRIORITIES
from recjax.models.attention import KERNELS
from recjax.models.decoder import REMAT
from recjax.models.decoder_config import DELTA_PROJECTIONS, PROJECTIONS
from tests.marks import campaign, slow
from tests.test_tutorials import blocks

QUICKSTART = "experiments/quickstart.yaml"
ROOT = Path(__file__).parents[2]


def load(*overrides):
    return load_config(ROOT / QUICKSTART, overrides)


@pytest.mark.slow
def test_reading_a_config_imports_neither_models_nor_data():
    heavy = ["flax", "pyarrow", "jax.experimental.pallas", "transformers", "datasets", "orbax"]
    program = "import json, sys; from recjax.config import load_config; load_config(sys.argv[1]);"
    program += "print(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-c", program, QUICKSTART]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    loaded = json.loads(done.stdout)
    assert "recjax.config" in loaded and not [name for name in heavy if name in loaded]


def configuration_page() -> str:
    """The whole content of docs/configuration.md: its beginning as it is, then tables of all keys."""
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    lines = [page.partition("\n## The run\n")[0].rstrip()]
    for name, meaning, keys in config_help.sections():
        lines += ["", f"## {name or 'The run'}", "", meaning, ""]
        lines += ["| key | takes | default | meaning |", "|---|---|---|---|"]
        for key in keys:
            meaning = key.meaning.replace("|", "\\|")
            lines.append(f"| `{key.name}` | {key.takes} | `{key.default}` | {meaning} |")
    return "\n".join(lines) + "\n"


def test_every_key_is_described_and_documented():
    keys = [key for _, _, keys in config_help.sections() for key in keys]
    assert {key.name for key in keys} == {key for key, field in KEYS.items() if not block_of(field.annotation)}
    assert not [key.name for key in keys if not key.meaning]
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    common, _, tables = page.partition("\n## The run\n")
    cells = {line.replace("\\|", "").count("|") for line in tables.splitlines() if line.startswith("|")}
    assert len(cells) == 1, "rows of a table have as many cells as its head"
    defaults = {key.name: key.default for key in keys}
    stated = re.findall(r"`([\w.]+): ([^`]+)`", common.split("## Common keys\n")[1])
    assert len(stated) > 20 and stated == [(name, defaults[name]) for name, _ in stated]
    assert page == configuration_page(), "write tests.config.test_config.configuration_page() to docs/configuration.md"


def test_an_empty_mapping_takes_back_what_the_file_says(tmp_path):
    path, own = tmp_path / "own.yaml", "task.reward_weights={length: -0.1}"
    path.write_text((ROOT / QUICKSTART).read_text() + "\nexperience: {record: true}\n")
    assert load_config(path, [own]).task.reward_weights == {"length": -0.1}
    assert load_config(path, [own, "task.reward_weights={}"]).task.reward_weights == {}
    assert load_config(path, [own, "task={reward_weights: {}}"]).task.reward_weights == {}
    assert load_config(path, [own, "task.reward_weights={length: -0.2}"]).task.reward_weights == {"length": -0.2}


def test_targets_of_adapters_may_have_the_names_of_peft():
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    of_delta_nets = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
    for names in ([*layers, *of_delta_nets], [*PROJECTIONS, *of_delta_nets]):
        lora = load("model.decoder=null", "model.path=x", f"model.lora={{targets: [{', '.join(names)}]}}").model.lora
        assert tuple(lora.targets) == (*PROJECTIONS, *DELTA_PROJECTIONS)


def test_choices_are_those_that_are_implemented():
    assert typing.get_args(Attention) == ("auto", *KERNELS)
    assert typing.get_args(Remat) == tuple(REMAT)
    assert typing.get_args(Projection) == (*PROJECTIONS, *DELTA_PROJECTIONS)
    assert typing.get_args(Priority) == tuple(PRIORITIES)


@pytest.mark.parametrize("key", [key for key, field in KEYS.items() if choices_of(field.annotation)])
def test_every_choice_refuses_other_values_and_names_its_own(key):
    value = "[sideways]" if key == "model.lora.targets" else "sideways"
    with pytest.raises(ValueError) as error:
        load(f"{key}={value}")
    assert f"{key} = " in str(error.value) and "sideways" in str(error.value)
    assert f"{', '.join(choices_of(KEYS[key].annotation))}" in str(error.value).partition(": takes ")[2]


EXPERIMENTS = sorted(ROOT.glob("experiments/**/*.yaml"))
SWEEPS = [path for path in EXPERIMENTS if "\ngrids:" in path.read_text()]
# tests/experiments/test_drift_plan.py reads a study's plan.
CONFIGS = [path for path in EXPERIMENTS if path not in SWEEPS and path.name not in ("plan.yaml", "checks.yaml")]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_experiment_is_a_valid_config(path):
    load_config(path)


@pytest.fixture(scope="module")
def schema():
    made = config_help.json_schema()
    committed = json.loads((ROOT / "experiments/config.schema.json").read_text(encoding="utf-8"))
    assert committed == made, "python -m recjax.schema > experiments/config.schema.json"
    jsonschema.Draft202012Validator.check_schema(made)
    return made


def is_accepted(values, schema) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(values)


def test_every_experiment_names_the_schema_and_validates(schema, tmp_path):
    for path in CONFIGS:
        modeline = path.read_text(encoding="utf-8").partition("\n")[0]
        name = modeline.removeprefix("# yaml-language-server: $schema=")
        assert (path.parent / name).resolve() == ROOT / "experiments/config.schema.json", path
        assert is_accepted(read_yaml_file(path), schema), path
    assert is_accepted({"output": "x", "task": "reasoning_gym:count_bits"}, schema)
    (tmp_path / "config.yaml").write_text(to_yaml(load("optimizer.clip_norm=.inf")), encoding="utf-8")
    assert is_accepted(stored_values(tmp_path / "config.yaml"), schema)


@pytest.mark.parametrize(
    "text",
    [
        "task: gsm8k",
        "task: {file: {train: rows.jsonl}, mixture: null}",
        "task: letter_counting",
        "task: {verifiers: my-words, agent_turns: 3}",
        "task: {mixture: {lake: {gymnasium: FrozenLake-v1}}}",
        "task: {verifiers: 3}",
        "rollout: {engine: 'http://127.0.0.1:8080'}",
        "rollout: {engine: {url: 'http://127.0.0.1:8080', concurrency: 4}}",
        "rollout: {engine: 8080}",
        "rollout: {stop: ['#'], record_routing: no, top_p: 0.9}",
        "rollout: {top_p: 0.0}",
        "rollout: {record_routing: never}",
        "algorithm: {weight: 'tests.algorithms.mine:bounded', clip: dual, mask: {name: high_entropy, share: 0.1}}",
        "algorithm: {preset: cispo, weight: {cap: 3}, reference_kl: {coefficient: 0.1, estimator: k1}}",
        "algorithm: {preset: grop}",
        "algorithm: {weight: truncate}",
        "algorithm: {reference_kl: {coeficient: 0.1}}",
        "algorithm: grpo",
        "model: quickstart",
        "optimizer: {schedule: cosine, learning_rate: 1e-3, clip_norm: .inf}",
        "optimizer: {schedule: {name: cosine_decay_schedule, alpha: 0.1}}",
        "optimizer: {schedule: quadratic}",
        "optimizer: {learning_rate: '00.5', warmup_steps: 1_000}",
        "optimizer: {warmup_steps: 1.5}",
        "training: {steps: 0x10}",
        "training: {steps: 010, micro_batch_prompts: null}",
        "training: {micro_batch_prompts: 0}",
        "training: {step: 10}",
        "evaluation: {initial_kl: On}",
        "evaluation: null",
        "experience: null",
        "model: {path: x, lora: {targets: [q_proj, value]}}",
        "model: {path: x, lora: {targets: [sideways]}}",
        "mesh: {data: -1, tensor: 2}",
        "seed: one",
    ],
)
def test_the_schema_takes_what_a_block_takes(text, schema):
    """Whether blocks fit together is for `load_config` alone."""
    values = {"output": "x", "model": {"path": "x"}, **read_yaml(text)}
    errors = []
    try:
        Config.model_validate(values)
    except pydantic.ValidationError as error:
        errors = error.errors()
    takes = not any(each["loc"] or each["ctx"]["error"].where.startswith("algorithm.") for each in errors)
    assert is_accepted(values, schema) == takes


def test_the_schema_has_meanings_and_choices(schema):
    meanings = {key.name: key.meaning for _, _, keys in config_help.sections() for key in keys}
    meanings |= {name: meaning for name, meaning, _ in config_help.sections()}
    for name, field in KEYS.items():
        *around, last = name.split(".")
        block = schema
        for part in around:
            places = [block["properties"][part], *block["properties"][part].get("anyOf", [])]
            (reference,) = [place["$ref"] for place in places if "$ref" in place]
            block = schema["$defs"][reference.removeprefix("#/$defs/")]
        found = block["properties"][last]
        assert found["description"] == meanings.get(name, found["description"]) and found["description"], name
        for choice in choices_of(field.annotation):
            assert f'"{choice}"' in json.dumps(found), name


LARGE = [ROOT / "experiments" / f"{name}.yaml" for name in ("claims/grid", "claims/map")]


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in SWEEPS if path not in LARGE], ids=lambda path: path.stem)
def test_every_sweep_is_of_valid_configs(path):
    assert read_sweep(path)[1]


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)  # slow tests read these whole
def test_every_setting_of_a_large_sweep_is_valid(path, tmp_path):
    sweep = yaml.safe_load(path.read_text()) | {"smoke": None}
    first = {axis: [str(next(iter(names)))] for axis, names in sweep["settings"].items()}
    sweep |= {"config": str(path.parent / sweep["config"]), "grids": [{**first, axis: "all"} for axis in first]}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep, sort_keys=False))
    assert len(read_sweep(tmp_path / "sweep.yaml")[1]) == sum(map(len, sweep["settings"].values())) - len(first) + 1


def test_overrides_reach_their_keys_with_their_types():
    config = load("optimizer.learning_rate=1e-6", "seed=3", "regime.sync_interval=7", 'rollout.stop=["\\n"]')
    assert config.optimizer.learning_rate == 1e-6 and isinstance(config.optimizer.learning_rate, float)
    assert (config.seed, config.regime.sync_interval, config.rollout.stop) == (3, 7, ["\n"])


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("output", "run #3", "run #3"),
        ("output", "008", "008"),
        ("model.path", "no", "no"),
        ("task.reward", "mine:score", "mine:score"),
        ("tracking.wandb.notes", "one # two\nthree", {"notes": "one # two\nthree"}),
        ("rollout.stop", "['#', \"\n\"]", ["#", "\n"]),
        ("rollout.stop", "[no, 010]", ["no", "010"]),
        ("seed", "008", 8),
        ("seed", "010", 10),
        ("seed", "1_000", 1000),
        ("optimizer.clip_norm", "00.5", 0.5),
        ("training.profile_steps", "[03, 010]", [3, 10]),
        ("task.reward_weights", "{length: 01.5}", {"length": 1.5}),
        ("evaluation.initial_kl", "yes", True),
    ],
)
def test_overrides_keep_text_and_read_decimal_digits(key, text, value, tmp_path):
    others = ["model.decoder=null"] if key == "model.path" else []
    config = load(*others, f"{key}={text}")
    assert functools.reduce(getattr, key.removesuffix(".notes").split("."), config) == value
    stored = tmp_path / "config.yaml"
    stored.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(stored) == config


def test_a_system_prompt_of_several_lines_is_taken_whole():
    prompt = "You are a solver.\nRules: think first. # then answer"
    assert load("task=gsm8k", f"task.system_prompt={prompt}").task.system_prompt == prompt


def test_files_have_decimal_numbers_and_plain_texts(tmp_path):
    path = tmp_path / "own.yaml"
    content = (ROOT / QUICKSTART).read_text().replace("seed: 0", "seed: 010")
    path.write_text(content + "\ntracking: {wandb: {name: 2024_01, group: on}}\n")
    config = load_config(path)
    assert config.seed == 10 and config.tracking.wandb == {"name": "2024_01", "group": "on"}


def test_derived_values_are_those_of_their_keys():
    config = load("rollout={temperature: 0.7, top_k: 6, top_p: 0.9, min_p: 0.1}", "evaluation={top_k: 3, min_p: 0.2}")
    assert tuple(config.rollout.sampling()) == (0.7, 6, 0.9, 0.1)
    assert tuple(config.evaluation.sampling()) == (1.0, 3, 1.0, 0.2)
    split = load("training.micro_batch_prompts=4")
    assert split.micro_batches(100) == split.micro_batches(10**6, 2) == 4
    assert load("optimizer.clip_norm=.inf").optimizer.clip_norm == float("inf")
    assert load("regime.mode=async", "regime.max_staleness=0", "regime.sync_interval=1").regime.max_staleness == 0


@pytest.mark.parametrize(
    ("positions", "shards", "parts"),
    [
        (100, 1, 1),
        (8191, 1, 1),
        (8192, 1, 2),
        (16383, 1, 2),
        (40000, 1, 8),
        (10**6, 1, 16),
        (10**6, 4, 4),
        (10**6, 3, 1),
    ],
)
def test_micro_batches_have_four_thousand_tokens_a_device(positions, shards, parts):
    assert load("rollout.prompts_per_step=16").micro_batches(positions, shards) == parts


def test_later_overrides_win_and_keep_the_block():
    config = load("seed=1", "seed=2", "warm_start.steps=5")
    assert config.seed == 2 and config.warm_start.steps == 5
    assert config.warm_start.wrong_fraction == load().warm_start.wrong_fraction


@pytest.mark.parametrize("name", ["gsm8k", "math", "guru_math", "toolace", "arithmetic"])
def test_a_text_as_task_replaces_the_whole_block(name):
    config = load("task.system_prompt=null", "task.success=2.0", f"task={name}")
    expected = TaskConfig(**{name: block_of(TaskConfig.model_fields[name].annotation)()})
    assert config.task == expected
    assert load("task.success=2.0", f"task={name}", "task.success=3.0").task.success == 3.0


def test_task_text_can_name_a_generator(tmp_path):
    file = tmp_path / "gym.yaml"
    file.write_text("output: x\nmodel: {path: x}\ntask: reasoning_gym:count_bits\n")
    config = load_config(file, ["task.reasoning_gym.options.max_n=63"])
    assert config.task.reasoning_gym == ReasoningGymTask(name="count_bits", options={"max_n": 63})
    assert config.task.arithmetic is None


URL = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("values", "overrides", "name", "expected"),
    [
        (
            {"rollout": {"engine": URL}},
            ["rollout.engine.retries=1"],
            "rollout.engine",
            EngineConfig(url=URL, retries=1),
        ),
        (
            {"rollout": {"engine": {"url": "http://a", "retries": 1}}},
            [f"rollout.engine={URL}"],
            "rollout.engine.retries",
            6,
        ),
        ({}, [f"rollout.engine={URL}", "rollout.engine.retries=1"], "rollout.engine", EngineConfig(url=URL, retries=1)),
        (
            {"optimizer": {"schedule": "linear"}},
            ["optimizer.schedule.end_value=0.1"],
            "optimizer.schedule.name",
            "linear_schedule",
        ),
        (
            {"optimizer": {"schedule": "linear"}},
            ["optimizer.schedule={name: cosine_decay_schedule}"],
            "optimizer.schedule",
            {"name": "cosine_decay_schedule"},
        ),
        ({"optimizer": {"schedule": "linear"}}, ["optimizer.learning_rate=0.1"], "optimizer.schedule", "linear"),
        (
            {"algorithm": {"clip": "two_side"}},
            ["algorithm.clip={epsilon_low: 0.1}"],
            "algorithm.clip",
            {"name": "two_side", "epsilon_low": 0.1},
        ),
        (
            {"algorithm": {"weight": "importance", "clip": {"name": "one_side", "epsilon_low": 0.3}}},
            ["algorithm.weight=truncated", "algorithm.clip=two_side", "algorithm.clip.epsilon_low=0.1"],
            "algorithm.clip",
            {"name": "two_side", "epsilon_low": 0.1},
        ),
        (
            {"task": {"gymnasium": "FrozenLake-v1"}, "rollout": {"max_context_tokens": 64}},
            ["task.gymnasium.problems=9"],
            "task.gymnasium.problems",
            9,
        ),
        (
            {"task": {"verifiers": "mine"}, "rollout": {"max_context_tokens": 64}},
            ["task.verifiers={problems: 9}"],
            "task.verifiers.name",
            "mine",
        ),
        ({"task": "gsm8k"}, ["task.gsm8k.train=own", "task.reward=math"], "task.gsm8k.evaluation", "openai/gsm8k"),
    ],
)
def test_short_forms_keep_their_meaning_under_overrides(values, overrides, name, expected):
    base = {"output": "o", "model": {"path": "m"}, "task": "gsm8k"}
    assert value_of(make_config(base | values, overrides), name) == expected


def test_a_replaced_option_keeps_a_schedule_named_by_a_text():
    config = make_config(
        {"output": "o", "model": {"path": "m"}, "task": "gsm8k", "optimizer": {"schedule": "linear"}}, []
    )
    schedule = config.replace(**{"optimizer.schedule.end_value": 0.1}).optimizer.schedule
    assert schedule["name"] == "linear_schedule" and schedule["end_value"] == 0.1
    named = {"optimizer.schedule.name": "cosine_decay_schedule"}
    assert config.replace(**named).optimizer.schedule == named_schedule({})
    option = {"optimizer.schedule.alpha": 0.1}
    for changes in (named | option, option | named):  # in any order, another name replaces the short form
        assert config.replace(**changes).optimizer.schedule == named_schedule({"alpha": 0.1})
        overridden = make_config(config.model_dump(exclude_unset=True), changes)
        assert overridden.optimizer.schedule == named_schedule({"alpha": 0.1})


def named_schedule(options):
    return {"name": "cosine_decay_schedule", **options}


@pytest.mark.parametrize(
    ("values", "override", "message"),
    [
        ({"task": "gsm8kk"}, "task.gsm8k.train=own", "config: task = 'gsm8kk': names no task; did you mean 'gsm8k'"),
        ({"optimizer": 3}, "optimizer.learning_rate=0.1", "config: optimizer = 3: takes keys and values"),
        (
            {"optimizer": {"schedule": "cosin"}},
            "optimizer.schedule.alpha=0.1",
            "schedule.name = 'cosin': is no schedule",
        ),
        (
            {"rollout": {"engine": "http://me:secret@a"}},
            "rollout.engine.retries=1",
            r"config: .*engine.url = .*me:\*\*\*@",
        ),
    ],
)
def test_values_that_are_no_block_are_refused(values, override, message):
    with pytest.raises(ValueError, match=message):
        make_config({"output": "o", "model": {"path": "m"}, "task": "gsm8k"} | values, [override])


def test_the_tasks_own_reward_stands_where_none_is_named():
    names = {text: load(f"task={text}").task.reward_name() for text in ("toolace", "math", "arithmetic")}
    assert names == {"toolace": "tool_calls", "math": "math", "arithmetic": "recjax.tasks.rewards:number_match"}
    assert load("task.arithmetic.worked=true").task.reward_name() == "recjax.tasks.rewards:last_number_match"
    assert load("task=gsm8k", "task.reward=a:b").task.reward_name() == "a:b"
    assert load("task=reasoning_gym:gcd", "task.reward=math").task.reward_name() == "math"


def test_a_config_can_be_written_in_python():
    model = ModelConfig(decoder=DecoderShape())
    config = Config(output="runs/own", model=model, task="arithmetic", rollout=RolloutConfig(group_size=2))
    nested = {"model": {"decoder": {}}, "task": {"arithmetic": {}}, "rollout": {"group_size": 2}}
    assert config == Config(output="runs/own", **nested) == make_config({"output": "runs/own", **nested})
    block = next(block for block in blocks(ROOT / "docs/configuration.md") if block.language == "python")
    exec(block.text, names := {})
    assert names["config"].rollout.group_size == 8 and names["config"].task == TaskConfig(arithmetic=ArithmeticTask())
    for block in (config, config.training, config.task.arithmetic):
        with pytest.raises(ValueError, match="^steps = 3: a config never changes; make another one") as error:
            block.steps = 3
        expected = make_config({"output": "runs/own", **nested}, ["training.steps=80"])
        for call in re.findall(r"config\.replace\(.*?80\}?\)", str(error.value)):
            changed = eval(call, {"config": config})
            assert changed == expected != config and changed.model_fields_set == expected.model_fields_set
    for wrong, words in (
        ({"regime": RegimeConfig(mode="async")}, "regime.max_staleness = None: is required"),
        ({"regime": {"sync_interval": 0}}, "^regime.sync_interval = 0: takes an integer, 1 or more$"),
        ({"task": "gms8k"}, "^task = 'gms8k': names no task; did you mean 'gsm8k'"),
        ({"stepz": 3}, r"^unknown key 'stepz' \(value 3\)"),
        ({"optimizer": {"learning_rat": 1}}, "'optimizer.learning_rat'.*did you mean 'optimizer.learning_rate'"),
        ({"output": None}, "^output = None: takes text"),
    ):
        with pytest.raises(ValueError, match=words):
            Config(**{"output": "runs/own", "model": model, "task": "arithmetic"} | wrong)
    with pytest.raises(ValueError, match="^unknown key 'group_siz'.*did you mean 'group_size'"):
        RolloutConfig(group_siz=2)


def test_file_errors_name_the_file(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"no such file or directory\)$"):
        load_config(tmp_path / "missing.yaml")
    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError, match=r"no such file or directory\)$"):
        load_config("experiments/missing.yaml")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="experiments/ is a folder of recjax's repository: give the command there"):
        load_config("experiments/claims/laboratory.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("seed: [1")
    with pytest.raises(ValueError, match=r"broken.yaml: not a valid YAML"):
        load_config(broken)
    broken.write_text("seed: 0\n")
    with pytest.raises(ValueError, match="output has no value"):
        load_config(broken)


ODD_PIECES = ("${", "\\", "$", "{", "}", "\n", "\x85", "\u2028", ": ", " #", "'", '"', "null", "1e5", "\ufeff", "010")
ODD = st.lists(st.text() | st.sampled_from(ODD_PIECES)).map("".join)


ODD_ARGUMENTS = st.dictionaries(ODD, st.lists(ODD | st.dictionaries(ODD, ODD, max_size=3), max_size=3), max_size=3)


@pytest.mark.parametrize("examples", [*slow(8), *campaign(200)])
def test_a_stored_config_keeps_odd_texts(tmp_path, examples):
    stored = tmp_path / "odd.yaml"

    @hypothesis.settings(deadline=None, max_examples=examples)
    @hypothesis.given(ODD, ODD, ODD_ARGUMENTS)
    @hypothesis.example("${HOME}", "\\${HOME}", {"${key}": [{"deep": "a\\\\${b} $ {c}"}]})
    def keeps(prompt, stop, arguments):
        task, tracking = {"gsm8k": {}, "system_prompt": prompt}, {"wandb": arguments}
        config = Config(output="runs/x", model={"decoder": {}}, task=task, rollout={"stop": [stop]}, tracking=tracking)
        stored.write_text(to_yaml(config), encoding="utf-8")
        assert load_config(stored) == config
        assert stored_values(stored) == config.model_dump()

    keeps()


def test_stored_config_loads_back_to_the_same(tmp_path):
    config = load("optimizer.learning_rate=1e-6", "algorithm.clip.epsilon_high=2.0")
    stored = tmp_path / "config.yaml"
    stored.write_text(to_yaml(config))
    assert load_config(stored) == config
    assert "epsilon_low" in stored.read_text()  # the preset's own options are spelled out
    assert yaml.safe_load(stored.read_text())["optimizer"]["learning_rate"] == 1e-6
