"""Dry runs: what they foretell is what a run has, and they read no weights."""

import json
import re
from unittest import mock

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recjax.config import RegimeConfig, load_config
from recjax.experience.batch import sampled_shape
from recjax.experience.layout import Layout
from recjax.hub import policy
from recjax.models import logprobs
from recjax.models.decoder import REMAT
from recjax.models.logprobs import Sampling
from recjax.models.trainable import split_params
from recjax.planning import dry_run as planning
from recjax.planning import programs
from recjax.planning.dry_run import (
    compact,
    count,
    dry_run,
    first_steps,
    print_dry_run,
    show_dry_run,
    warn_of_memory,
)
from recjax.planning.programs import batch_arrays, resident_arrays, resolve_shapes
from recjax.planning.targets import ACCELERATORS, device_memory, named_devices
from recjax.rollout import decoding
from recjax.runs import other_models
from recjax.runs.prepare import prepare
from recjax.training.mesh import make_mesh
from recjax.training.update import TrainState, UpdateContext, hyperparameters_of, make_optimizer, recipe_of, update
from tests.hub.test_published import PUBLISHED
from tests.marks import campaign, slow
from tests.rollout.reference_sampler import sample
from tests.training.simulated_run import simulated
from tests.training.tiny_run import TINY


@pytest.fixture
def tiny(tmp_path):
    """A function from overrides to a config of the tiny run."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    return lambda *overrides: load_config(tmp_path / "tiny.yaml", [f"output={tmp_path / 'run'}", *overrides])


@pytest.fixture
def no_weights(monkeypatch):
    """Whoever reads or makes weights fails."""

    def fail(*args):
        raise AssertionError("a dry run must not touch weights")

    monkeypatch.setattr(policy, "load_pretrained", fail)
    monkeypatch.setattr(policy, "init_params", fail)


@pytest.fixture
def no_activations(monkeypatch):
    """A function after whose call dry runs do not trace the update, which takes most of their time."""
    return lambda: monkeypatch.setattr("recjax.planning.dry_run._activations", lambda *_: 1)


def published(folder, name):
    """Overrides for a model of which there is only config.json."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name][1]))
    return ["model.decoder=null", f"model.path={folder}"]


def memory(result):
    return {item.name: item.bytes for item in result.memory}


@pytest.mark.parametrize("name", [*slow("Qwen2.5-1.5B-Instruct"), *campaign("Llama-3.1-8B", "Qwen2.5-7B-Instruct")])
def test_parameters_are_the_published_ones_from_config_json_alone(tiny, tmp_path, no_weights, capsys, name):
    options = [
        "rollout.max_prompt_tokens=64",
        "model.dtype=bfloat16",
        "algorithm.preset=red_weight",
        "regime.sync_interval=2",
    ]
    config = tiny(*published(tmp_path / "model", name), *options)
    result = dry_run(config)
    assert count(result.model.trained) == PUBLISHED[name][0] and count(result.model.frozen) == 0
    found = memory(result)
    assert found["trained parameters"] == 4 * PUBLISHED[name][0]
    assert 2 * PUBLISHED[name][0] <= found["sampler's copy"] <= 2.01 * PUBLISHED[name][0]  # norms stay float32
    show_dry_run(result)
    printed = capsys.readouterr().out
    assert f"parameters {PUBLISHED[name][0]:,}" in printed and "weight: exp_advantage" in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("limits", "warning"),
    [
        ("max_prompt_tokens: 30000, max_completion_tokens: 2768", ""),
        ("max_prompt_tokens: 30000, max_completion_tokens: 2769", "32768 tokens, and a prompt with its completion may"),
    ],
)
def test_rows_beyond_the_models_context_are_warned_of(tiny, tmp_path, no_activations, caplog, limits, warning):
    no_activations()
    dry_run(tiny(*published(tmp_path / "model", "Qwen2.5-7B-Instruct"), f"rollout={{{limits}}}"))
    assert bool(warning) == ("max_position_embeddings" in caplog.text) and warning in caplog.text


@pytest.mark.parametrize("device", [None, "host", "h100-80"])
@pytest.mark.parametrize(
    ("dtype", "flags", "said"),
    [
        ("bfloat16", "avx2 avx512f", "this CPU lacks bfloat16 instructions; float32 is faster"),
        ("bfloat16", "avx512f avx512_bf16", ""),
        ("bfloat16", "asimd bf16", ""),
        ("float32", "avx2", ""),
    ],
)
def test_a_cpu_without_bfloat16_is_warned_of(
    tiny, tmp_path, no_activations, monkeypatch, caplog, dtype, flags, said, device
):
    no_activations()
    monkeypatch.setattr(policy, "CPU_INFO", tmp_path / "cpuinfo")
    policy.CPU_INFO.write_text(f"model name : any\nflags : fpu {flags}\n")
    planning.planned_run(tiny(f"model.dtype={dtype}"), device)
    is_this_machine = device in (None, "host")
    assert ("lacks bfloat16" in caplog.text) == (bool(said) and is_this_machine)
    if is_this_machine:
        assert said in caplog.text


def test_the_log_says_which_dtype_a_cpu_takes(tiny, tmp_path, no_activations, monkeypatch, caplog, package_logger):
    no_activations()
    package_logger.propagate = True
    caplog.set_level("INFO", "recjax")
    monkeypatch.setattr(policy, "CPU_INFO", tmp_path / "cpuinfo")
    for flags, said in (("avx2", "lacks bfloat16"), ("amx_bf16", "time a few steps with model.dtype=bfloat16")):
        policy.CPU_INFO.write_text(f"flags : {flags}\n")
        assert policy.compute_dtype("auto") == jnp.float32
        caplog.clear()
        planning.planned_run(tiny("model.dtype=auto"))
        assert said in caplog.text and "float32, the default on CPUs" in caplog.text


def test_a_missing_tokenizer_hides_only_its_own_facts(tiny, tmp_path, no_weights, capsys):
    config = tiny(*published(tmp_path / "model", "Qwen2.5-1.5B-Instruct"))
    result = dry_run(config)
    assert result.prompt_tokens is None and {item.phase for item in result.memory} == {"always"}
    show_dry_run(result)
    printed = capsys.readouterr().out
    (missing,) = result.missing
    assert "holds no tokenizer" in missing and "set rollout.max_prompt_tokens" in printed
    assert "54 problems to train on" in printed and "in all" not in printed


def test_a_missing_model_hides_only_its_own_facts(tiny, tmp_path, no_weights, monkeypatch, capsys):
    def unreachable(*args, **options):
        raise OSError("no network here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    options = ["model.decoder=null", "model.path=Qwen/Qwen2.5-1.5B-Instruct", "regime.sync_interval=3"]
    result = dry_run(tiny(*options))
    assert result.model is None and len(result.missing) == 1 and not result.notes
    assert print_dry_run(str(tmp_path / "tiny.yaml"), options) == 1
    printed, errors = capsys.readouterr()
    assert "error: model 'Qwen/Qwen2.5-1.5B-Instruct': is no local folder" in errors and "to run it" not in printed
    assert "give a local folder" in errors
    assert "staleness of steps 1 to 7: 0–2 ×2, 0" in printed and "48 of 16 completions" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["model.lora={rank: 2}"],
        *campaign([], ["model.freeze=[embedding]"]),
    ],
)
def test_resident_memory_equals_a_real_runs(tiny, options, no_activations):
    config = tiny(*options, "regime.sync_interval=2")
    result, (run, params) = dry_run(config), prepare(config)
    no_activations()
    trained, frozen = split_params(params, config.model)
    assert jax.tree.map(jnp.shape, (trained, frozen)) == jax.tree.map(
        lambda leaf: leaf.shape, (result.model.trained, result.model.frozen)
    )
    moments = make_optimizer(config.optimizer).init(trained)
    found, size = memory(result), sum(leaf.nbytes for leaf in jax.tree.leaves(trained))
    assert found["trained parameters"] == found["sampler's copy"] == size
    assert found.get("frozen parameters", 0) == sum(x.nbytes for x in jax.tree.leaves(frozen))
    assert found["optimizer's state"] == sum(leaf.nbytes for leaf in jax.tree.leaves(moments))
    assert 0 <= found["optimizer's state"] - 2 * size <= 8
    assert result.prompt_tokens == run.train.tokens.shape[1]
    assert "sampler's copy" not in memory(dry_run(tiny(*options, "regime.sync_interval=1")))
    kl = ("model.dtype=bfloat16", "evaluation.initial_kl=true")
    half = memory(dry_run(tiny(*options, "regime.sync_interval=2", *kl)))
    synced = memory(dry_run(tiny(*options, "regime.sync_interval=1", *kl)))
    assert synced["weights as they compute"] == half["sampler's copy"] and "sampler's copy" not in synced
    assert half.get("frozen parameters", 0) <= found.get("frozen parameters", 0)
    assert half["sampler's copy"] == half["trained parameters as they were at the start"] < found["sampler's copy"]
    assert not [name for name in found if name.endswith("at the start")]


@pytest.mark.parametrize(
    ("players", "copies"), [("policy, d: 'x:y'", 0), ("3", 1), ("initial, c: 3", 2), ("initial, c: 30", 1)]
)
def test_each_older_version_of_frozen_seats_has_a_copy(tiny, no_activations, players, copies):
    no_activations()
    seats = ["task.agent=x:y", f"task.seats={{a: policy, b: {players}}}", "rollout.max_context_tokens=32"]
    found = memory(dry_run(tiny(*seats, "model.dtype=bfloat16", "model.freeze=[embedding]")))
    assert found.get("older weights of frozen seats", 0) == copies * found["weights as they compute"]
    alone = memory(dry_run(tiny(*seats[::2], "model.dtype=bfloat16", "model.freeze=[embedding]")))
    assert found["keys and values"] == (1 + copies) * alone["keys and values"]


@pytest.mark.parametrize("device", ["host", "h100-80"])
def test_agents_fill_slots_up_to_their_context(tiny, no_activations, device):
    no_activations()
    agent = ["task.agent=x:y", "rollout.max_context_tokens=300", "rollout.prompts_per_step=5", "rollout.group_size=3"]
    result = dry_run(tiny(*agent), *[named_devices(device)] * (device != "host"))
    shape = result.model.decoder.config
    # 15 agents in 16 slots with a prompt each, next to 8 prompts that wait; 512 tokens hold all others of 300.
    tokens = (16 + 8) * result.prompt_tokens + 16 * 512
    size = result.model.decoder.dtype.itemsize
    assert (
        memory(result)["keys and values"] == 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * size * tokens
    )


@pytest.mark.parametrize(("device", "layers", "copies"), [("h100-80", 2, 1), ("h100-80", 33, 0), ("v5e-16", 2, 0)])
def test_a_gpu_copies_the_few_layers_it_unrolls(tiny, no_activations, device, layers, copies):
    no_activations()
    sizes = f"hidden_size: 256, num_layers: {layers}, num_heads: 4, num_kv_heads: 4, intermediate_size: 512"
    config = tiny(f"model.decoder={{{sizes}}}", "model.dtype=bfloat16")
    found = memory(dry_run(config, named_devices(device)))
    kernels, norms = 4 * 256 * 256 + 3 * 256 * 512, 2 * 256  # in bfloat16, and in float32
    assert found.get("unrolled layers", 0) == copies * layers * (2 * kernels + 4 * norms)


@pytest.mark.parametrize(("device", "copies"), [("host", 1), ("h100-80", 0)])
def test_a_cpu_copies_few_keys_and_values(tiny, no_activations, monkeypatch, device, copies):
    no_activations()
    found = memory(dry_run(tiny(), *[named_devices(device)] * (device != "host")))
    later = found.pop("a round's copy in blocks", 0)
    assert bool(later) == copies and later < found["keys and values"]
    monkeypatch.setattr(decoding, "MOST_COPIED", 10)
    assert memory(dry_run(tiny(), *[named_devices(device)] * (device != "host"))) == found


@pytest.mark.parametrize(("chunk", "few"), [(2, 0), (2, 2**24), (10**6, 0)])
def test_chunks_of_few_scores_are_longer_than_their_key(tiny, no_activations, monkeypatch, chunk, few):
    no_activations()
    monkeypatch.setattr(logprobs, "FEW_SCORES", few)
    config = tiny(f"model.logprob_chunk={chunk}")
    result = dry_run(config)
    rollout = config.rollout
    tokens = rollout.prompts_per_step * rollout.group_size * rollout.max_completion_tokens
    positions = tokens if few or chunk > tokens else chunk
    vocabulary = result.model.decoder.config.vocab_size
    assert memory(result)["chunk of vocabulary scores"] == 4 * 4 * positions * vocabulary


@pytest.mark.slow
def test_keys_and_values_are_those_of_the_sampler(tiny):
    config = tiny("evaluation.samples=6")  # more rows than training has
    result = dry_run(config)
    decoder = result.model.decoder
    tokens = jnp.zeros((4, result.prompt_tokens), jnp.int32)
    _, cache = jax.eval_shape(
        lambda params: decoder.apply({"params": params}, tokens, tokens, tokens == 0), result.model.trained
    )
    prompts = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    loop = jax.make_jaxpr(
        lambda params: sample(
            decoder,
            params,
            tokens,
            tokens == 0,
            jax.random.key(0),
            group_size=6,
            max_tokens=3,
            sampling=Sampling(),
            stop_ids=(1,),
        )
    )(result.model.trained)
    shape = decoder.config
    drawn = f"[{shape.num_layers},24,{shape.num_kv_heads},3,{shape.head_dim}]"
    assert f"f32{drawn}" in str(loop)
    drawn_bytes = 2 * 4 * shape.num_layers * 24 * shape.num_kv_heads * 3 * shape.head_dim
    assert memory(result)["keys and values"] == prompts + drawn_bytes


@pytest.mark.slow
def test_update_memory_is_close_to_the_compilers_plan(tiny):
    shape = "{hidden_size: 64, num_layers: 4, num_heads: 4, num_kv_heads: 2, intermediate_size: 256}"
    sizes = ["rollout.max_completion_tokens=48", "rollout.group_size=8", "training.micro_batch_prompts=2"]
    config = tiny(f"model.decoder={shape}", *sizes)
    run, result = prepare(config)[0], dry_run(config)
    optimizer = make_optimizer(config.optimizer)
    state = TrainState(result.model.trained, jax.eval_shape(optimizer.init, result.model.trained))
    shape = sampled_shape(config, result.prompt_tokens)
    assert shape == (4, 8, result.prompt_tokens, 48)
    compiled = update.lower(
        state,
        batch_arrays(shape),
        Layout(2),
        UpdateContext({}, jax.random.key(0), hyperparameters=hyperparameters_of(config, 1e-3)),
        recipe=recipe_of(config, run.policy.decoder)._replace(decoder=run.policy.decoder, optimizer=optimizer),
    ).compile()
    planned = compiled.memory_analysis().temp_size_in_bytes
    foretold = sum(item.bytes for item in result.memory if item.phase == "update")
    assert 0.6 < foretold / planned < 1.4


@pytest.mark.campaign
def test_activations_grow_with_what_they_are_of(tiny):
    def activations(*options):
        return memory(dry_run(tiny(*options)))["activations"]

    plain = activations()
    assert activations("training.micro_batch_prompts=1") < plain / 2
    assert activations("rollout.max_completion_tokens=6") > 1.4 * plain
    for dtype in ("float32", "bfloat16"):
        deep = ("model.decoder.num_layers=4", f"model.dtype={dtype}")
        recomputed = {remat: activations(*deep, f"model.remat={remat}") for remat in REMAT}
        assert recomputed == dry_run(tiny(*deep)).activations
        assert recomputed["full"] < recomputed["dots"] < recomputed["attention"] < recomputed["none"]
        assert recomputed["full"] < recomputed["none"] / 2
    packed = [activations(f"training.tokens_per_micro_batch={budget}") for budget in (14, 28)]
    assert 1.5 * packed[0] < packed[1] < 2.5 * packed[0]
    with pytest.raises(ValueError, match="training.tokens_per_micro_batch = 5"):
        activations("training.tokens_per_micro_batch=5")
    # A group of 16 × 1,024 tokens is packed, so that completions of twice the length need little more.
    long = [activations("rollout.group_size=16", f"rollout.max_completion_tokens={n}") for n in (1024, 2048)]
    assert long[1] < 4 * long[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "regime",
    [
        pytest.param(RegimeConfig(sync_interval=m, sync_offset=n), marks=[pytest.mark.campaign] * (m == 3 or n == 2))
        for m in (1, 3, 20)
        for n in (0, 2, 10)
    ],
)
def test_the_staleness_schedule_is_that_of_the_loop(tiny, regime, monkeypatch):
    options = [f"regime.sync_interval={regime.sync_interval}", f"regime.sync_offset={regime.sync_offset}"]
    staleness = dry_run(tiny("training.steps=60", *options)).staleness
    for step, groups, *_ in simulated(tiny("training.steps=60", *options)):
        assert staleness[step - 1] == step - 1 - groups[0].completions[0].policy_version
    assert len(staleness) == 60
    assert first_steps(regime, 60) == min(2 * max(regime.sync_interval, regime.sync_offset) + 2, 60)


@pytest.mark.slow
def test_several_updates_age_a_batch_by_steps(tiny, capsys):
    updates = ["training.updates_per_batch=2", "training.minibatches=2", "training.steps=60"]
    config = tiny(*updates, "regime.sync_interval=3", "regime.sync_offset=2")
    result, ahead = dry_run(config), iter(simulated(config))
    for step in range(1, 61):
        groups = next(ahead)[1] if step % 4 == 1 else groups
        assert result.staleness[step - 1] == step - 1 - groups[0].completions[0].policy_version
    show_dry_run(result)
    printed = capsys.readouterr().out
    assert "tokens a batch of 4 steps" in printed and "54.0 steps an epoch, 1.11 epochs" in printed
    whole, halves = (memory(dry_run(tiny(*options))) for options in ([], updates))
    assert 0.4 < halves["activations"] / whole["activations"] < 0.6


@pytest.mark.parametrize(
    ("staleness", "words"),
    [
        ([0, 0, 0, 0], "0 ×4"),
        ([0, 1, 2, 0, 1, 2, 0], "0–2 ×2, 0"),
        ([0, 1, 2, 2, 2], "0–2, 2 ×2"),
        ([5], "5"),
        ([0, 1, 2, 10, 11, 10], "0–2, 10–11, 10"),
    ],
)
def test_compact_words(staleness, words):
    assert compact(staleness) == words


@pytest.mark.slow
def test_checkpoints_hold_the_queue_too(tiny):
    plain, ahead = dry_run(tiny()), dry_run(tiny("regime.sync_offset=3"))
    found = memory(plain)
    assert plain.checkpoint_bytes == found["trained parameters"] + found["optimizer's state"]
    assert dry_run(tiny("regime.sync_interval=2")).checkpoint_bytes == (
        plain.checkpoint_bytes + found["trained parameters"]
    )
    np.testing.assert_equal(ahead.checkpoint_bytes - plain.checkpoint_bytes, 3 * (4 * 4 * 5 + 16 * 3 * 9))


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("traning.steps=3", "did you mean 'training'"),
        ("model.freeze=[attic]", "model.freeze: 'attic' is in none of the paths"),
        ("evaluation.problems=81", "evaluation.problems = 81"),
        ("task.reward=nowhere:f", "task.reward = 'nowhere:f'"),
        ("rollout.max_prompt_tokens=3", "more than rollout.max_prompt_tokens = 3"),
        ("rollout={max_prompt_tokens: 3, long_prompts: drop}", "only 0 of 54 train problems"),
    ],
)
def test_a_config_that_could_not_run_is_status_2(tiny, tmp_path, capsys, no_activations, override, reason):
    tiny()
    no_activations()
    path = str(tmp_path / "tiny.yaml")
    assert print_dry_run(path, ["output=x", override]) == 2
    assert reason in capsys.readouterr().err
    assert print_dry_run(path, ["output=x"]) == 0


@pytest.mark.parametrize("device", [None, "h100-80"])
@pytest.mark.parametrize(
    ("missing", "remedy"),
    [
        ("model.path=models/none", "error: model 'models/none': is no local folder.*give a local folder with config"),
        ("task.gsm8k={train: nowhere}", "error: .*nowhere.*hf download"),
        ("experience.store=nowhere.db", "error: nowhere.db: is not an experience store .no such file.; create one"),
        ("experience.mix.store=nowhere.db", "error: nowhere.db: is not an experience store .no such file.; create one"),
        ("model.reference=models/none", "error: model 'models/none': is no local folder.*give a local folder with"),
    ],
)
def test_missing_model_or_data_gives_status_1(
    tiny, tmp_path, monkeypatch, capsys, no_activations, device, missing, remedy
):
    def unreachable(*args, **options):
        raise OSError("no network here")

    tiny()
    no_activations()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    also_needs = {
        "model.path": ["model.decoder=null"],
        "task.gsm8k": ["task.arithmetic=null", "task.reward=null"],
        "experience.store": ["algorithm.preset=opmd"],
        "model.reference": ["algorithm.reference_kl.coefficient=0.1"],
    }
    options = [*also_needs.get(missing.partition("=")[0], []), missing, "rollout.max_prompt_tokens=9"]
    assert print_dry_run(str(tmp_path / "tiny.yaml"), options, device) == 1
    printed, errors = capsys.readouterr()
    assert re.search(remedy, errors) and "to run it" not in printed and "staleness" in printed


def test_a_run_that_is_too_large_names_remedies(tiny, tmp_path, monkeypatch, capsys):
    tiny()
    path, last = str(tmp_path / "tiny.yaml"), None
    more_of_the_gpu = "JAX takes more of a GPU with the environment variable XLA_PYTHON_CLIENT_MEM_FRACTION"
    less = "needs less memory: model.remat=full: 46.88 GiB, which fits (the backward pass"
    larger = "the next larger topology is h100-80:2; mesh.fsdp=-1 splits weights and"
    for size, device, status, said in (
        (2**10, "h100-80", 0, ["to run it there: python -m recjax.train"]),
        (65 * 2**30, "h100-80", 1, [more_of_the_gpu]),
        (75 * 2**30, "h100-80", 1, [less, larger]),
        (75 * 2**30, "v5p-95", 0, ["it fits one v5p-95"]),
    ):
        shares = {"none": size, "attention": size - 1, "dots": size - 2, "full": size // 8}
        monkeypatch.setattr(planning, "_activations", lambda *given, shares=shares: shares[given[3]])
        assert print_dry_run(path, ["model.decoder.num_layers=2"], device) == status
        last = capsys.readouterr().out
        assert all(text in last for text in said)
        assert ("to run it" in last) == (status == 0) and ("needs less" in last) == (status == 1)
    assert "MEM_FRACTION" not in last
    monkeypatch.setattr(planning, "_activations", lambda *_: 75 * 2**30)
    overrides = ["task.overlong_tokens=3", "model.lora={rank: 2}", "rollout.max_completion_tokens=4"]
    assert print_dry_run(path, overrides, "h100-80") == 1  # half of the completion tokens are fewer than 3
    assert "needs less" not in capsys.readouterr().out
    monkeypatch.setattr(planning, "_activations", lambda *_: 65 * 2**30)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    assert print_dry_run(path, [], "h100-80") == 0  # as the remedy said


@pytest.mark.campaign
def test_a_mesh_splits_the_memory(tiny, capsys):
    wide = "{hidden_size: 32, num_layers: 1, num_heads: 4, num_kv_heads: 2, intermediate_size: 64}"
    options = [f"model.decoder={wide}", "rollout.prompts_per_step=8", "model.dtype=float32", "mesh.data=1"]
    options += ["training.micro_batch_prompts=8"]
    whole = memory(dry_run(tiny(*options)))
    config = tiny(*options, "mesh.fsdp=2", "mesh.tensor=2")
    result = dry_run(config, named_devices("h100:4"))
    split = memory(result)
    halves = ("trained parameters", "optimizer's state", "gradients: their sum, a micro-batch's")
    for name in halves:  # the vocabulary is odd, and norms are on all devices
        assert whole[name] / 4 < split[name] < 0.45 * whole[name], name
    assert split["activations"] < 0.35 * whole["activations"]
    assert split["keys and values"] == whole["keys and values"] // 4
    show_dry_run(result)
    assert "memory of each of 4 devices: data 1 × fsdp 2 × tensor 2" in capsys.readouterr().out
    with pytest.raises(ValueError, match="mesh: data 1, fsdp 2, tensor 2: 4 does not equal the number of devices, 8"):
        dry_run(config, named_devices("h100:8"))
    with pytest.raises(ValueError, match="mesh.fsdp = 64: does not divide the model's 32 units of the stream"):
        dry_run(tiny(*options, "mesh.fsdp=64"), named_devices("h100:64"))


@pytest.fixture
def untraced(monkeypatch):
    """Activations take no time to find: a thousand bytes."""
    monkeypatch.setattr(planning, "_activations", lambda *arguments: 1000)


def test_a_run_beyond_the_memory_is_warned(tiny, caplog, package_logger, untraced, monkeypatch):
    package_logger.propagate = True
    config = tiny()
    with jax.set_mesh(make_mesh(config.mesh, jax.devices()[:1])):
        run, params = prepare(config)
        del params
        needed = [item.bytes for item in dry_run(config).memory if item.phase in ("always", "update")]
        for share, warnings in ((1.01, 0), (0.99, 1)):
            monkeypatch.setattr(planning, "device_memory", lambda share=share: int(share * sum(needed)))
            warn_of_memory(run)
            assert len(caplog.records) == warnings
    assert re.search(r"the update phase needs about 0.0\d GiB of each device, which has 0.0\d GiB", caplog.text)
    assert device_memory() > 2**28


@pytest.mark.campaign
def test_devices_are_those_whose_memory_is_enough(tiny, tmp_path, capsys):
    tiny()
    path = str(tmp_path / "tiny.yaml")
    assert print_dry_run(path, ["output=x"]) == 0
    said = capsys.readouterr().out
    assert f"one device is enough: {', '.join(ACCELERATORS)}\n" in said and "planned in float32" in said
    assert "to run it: python -m recjax.train --config" in said
    wide = ["output=x", "model.decoder={hidden_size: 4096, num_layers: 6, intermediate_size: 16384}"]
    needed = {}
    for device in ("v5e-16", "h100-80"):
        assert print_dry_run(path, wide, device) == (0 if device == "h100-80" else 1)
        said = capsys.readouterr().out
        needed[device] = float(re.search(rf"one {device}: ([\d.]+) GiB of", said)[1])
        assert ("it fits" in said) == (device == "h100-80") and "compute in bfloat16" in said
    assert needed["v5e-16"] == needed["h100-80"] and needed["v5e-16"] * 2**30 > 16e9
    assert print_dry_run(path, wide) == 0
    fits, rest = re.search("one device is enough: (.*); too small: (.*)", capsys.readouterr().out).groups()
    assert (
        "h200-141" in fits
        and "t4-16" in rest
        and sorted([*fits.split(", "), *rest.split(", ")]) == sorted(ACCELERATORS)
    )
    assert print_dry_run(path, wide, "abacus") == 2 and "--device = 'abacus': is unknown" in capsys.readouterr().err


def test_a_teachers_kernel_is_that_of_the_planned_devices(tiny, monkeypatch):
    """A CPU plans for a GPU whose kernel it lacks itself."""
    options = [
        "model.attention=cudnn",
        "model.dtype=bfloat16",
        "model.teacher=teacher",
        "algorithm.distillation.coefficient=1",
    ]
    config = tiny(*options)
    model = resolve_shapes(config)[0]
    monkeypatch.setattr(programs, "teacher_shape", lambda config: model.decoder.config)
    monkeypatch.setattr(other_models, "teacher_shape", lambda config: model.decoder.config)
    weights = resident_arrays(config, model)[programs.TEACHER].tree
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} >= {jnp.dtype(jnp.bfloat16)}
    gpu = mock.Mock(jax.Device, platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    gpu.compute_capability = "9.0"
    assert other_models.teacher_decoder(config, gpu).attention == "cudnn"
