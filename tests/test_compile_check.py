"""compile_check: what it says of memory is what a run has, and what it says would fit does."""

import importlib.util

import jax
import pytest

from recjax import compile_check
from recjax.config import load_config
from recjax.models.decoder import init_params
from recjax.models.placement import bytes_on_device, param_shardings
from recjax.planning import programs as ahead
from recjax.planning.dry_run import dry_run, phase_bytes, sampling_items, smaller
from recjax.planning.programs import plan
from recjax.planning.targets import GIB, has_gpu_compiler, load_target, named_devices
from recjax.training.update import make_optimizer
from tests.training.tiny_run import TINY

SPLIT = ["mesh.data=1", "mesh.fsdp=4"]
# All that is left to make smaller are micro-batches and completions, and the activations are most of the memory.
LARGE = ["output=x", *SPLIT, "model.remat=full", "rollout.max_completion_tokens=32", "rollout.prompts_per_step=8"]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A config file of the tiny run."""
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(TINY)
    return str(path)


@pytest.fixture
def planned(file):
    """A function from overrides to a plan for the four devices here."""
    return lambda *overrides: plan(load_config(file, ["output=x", *overrides]), load_target("host"))


@pytest.fixture(scope="module")
def remembered():
    """`compiled` for a module: each program is compiled once, and how many were is counted."""
    programs = {}

    def once(planned, name):
        key = str(planned.config), str(planned.mesh), name
        if key not in programs:
            programs[key] = ahead.compiled(planned, name)
        return programs[key]

    once.programs = programs
    return once


@pytest.mark.slow
def test_a_fitting_config_gives_status_0(file, planned, remembered, monkeypatch, capsys):
    monkeypatch.setattr(compile_check, "compiled", remembered)
    assert compile_check.check(file, "host", LARGE) == 0
    printed = capsys.readouterr().out
    for words in ("data 1 × fsdp 4 × tensor 1", "optimizer's state", "keys and values", "temporaries", "fits host"):
        assert words in printed
    update = remembered(planned(*LARGE), "update")
    arguments = bytes_on_device(ahead.arguments_of(planned(*LARGE), "update"))
    assert 0 < update.temporaries < 1000 * arguments and update.refusal is None


@pytest.mark.slow
def test_a_backend_without_statistics_gets_estimates(planned):
    made = planned("model.remat=full")
    unknown = ahead.Program(None, 0.0)
    refused = ahead.Program(5 * GIB, 0.0, "RESOURCE_EXHAUSTED")
    always = {item.name: item.bytes for item in dry_run(made.config, named_devices("host")).memory}
    memory = compile_check.compiled_items(made, {"sample": unknown, "update": unknown})
    assert {item.name: item.bytes for item in memory} == always
    peaks = phase_bytes(compile_check.compiled_items(made, {"sample": unknown, "update": refused}))
    held = sum(item.bytes for item in memory if item.phase == "always")
    assert peaks == phase_bytes(memory) | {"update": held + 5 * GIB}


@pytest.mark.campaign
def test_too_large_is_status_1_with_a_remedy(file, planned, remembered, monkeypatch, capsys):
    monkeypatch.setattr(compile_check, "compiled", remembered)
    made = planned(*LARGE)
    names = ahead.programs_of(made.config)
    peaks = phase_bytes(compile_check.compiled_items(made, {name: remembered(made, name) for name in names}))
    assert peaks["sample"] < peaks["update"]
    memory = (peaks["update"] - 512) / GIB
    assert compile_check.check(file, "host", LARGE, memory=memory) == 1
    printed = capsys.readouterr().out
    assert "does not fit host: update" in printed
    remedy = printed.split("needs less memory: ")[1].split(" (")[0]
    assert remedy == "training.micro_batch_prompts=4"
    assert compile_check.check(file, "host", [*LARGE, remedy], memory=memory) == 0


def test_remedies_come_cheapest_first_for_the_large_phase(planned):
    def names(made, *too_large):
        return [change for change, _ in smaller(made.config, made.prompt_tokens, made.mesh, too_large)]

    every = names(planned("rollout.prompts_per_step=8"), "update")
    assert [name.split("=")[0] for name in every] == [
        "mesh.data",
        *["model.remat"] * 3,
        "training.micro_batch_prompts",
        "rollout.max_completion_tokens",
        "model.lora.rank",
    ]
    assert every[:2] == ["mesh.data=1 mesh.fsdp=4", "model.remat=attention"]
    assert every[2:4] == ["model.remat=dots", "model.remat=full"]
    shorter = ["mesh.data=1 mesh.fsdp=4", "rollout.max_completion_tokens=1"]
    assert names(planned(), "sample") == [*shorter, "model.lora.rank=16"]
    assert names(planned("model.freeze=[embedding]"), "sample") == shorter
    done = ["model.remat=full", "training.micro_batch_prompts=1", "rollout.max_completion_tokens=1"]
    done = planned(*SPLIT, *done, "model.lora={rank: 2}")
    assert names(done, "update") == []
    assert "training.tokens_per_micro_batch=32" in names(
        planned(*SPLIT, "training.tokens_per_micro_batch=64"), "update"
    )


@pytest.mark.campaign
@pytest.mark.parametrize("options", [[], SPLIT, ["mesh.data=2", "mesh.tensor=2"], ["model.lora={rank: 2}", *SPLIT]])
def test_held_bytes_are_those_of_arrays_that_lie_there(planned, options):
    made = planned(*options)
    params = init_params(made.model.decoder.config, jax.random.key(0))
    placed = jax.device_put(params, param_shardings(made.mesh, params))
    own = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(placed))
    optimizer = make_optimizer(made.config.optimizer)
    moments = jax.eval_shape(optimizer.init, made.model.trained)
    sizes = {name: bytes_on_device(tree) for name, tree in made.held.items()}
    assert sizes["trained parameters"] + sizes["frozen parameters"] == own
    if options:
        assert own < sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    scalars = sum(4 for leaf in jax.tree.leaves(moments) if leaf.ndim == 0)
    assert sizes["optimizer's state"] == 2 * sizes["trained parameters"] + scalars
    told = {item.name: item.bytes for item in dry_run(made.config).memory}
    here = sampling_items(made.config, made.model, made.prompt_tokens, made.mesh, made.target.memory, "cpu")
    cached = {item.name: item.bytes for item in here}["keys and values"]
    assert cached * 4 == told["keys and values"]  # every device has the weights whole, and samples rows of its own


@pytest.mark.campaign
def test_packed_micro_batches_are_compiled_as_they_are_run(planned):
    traced = ahead.traced_update(planned("training.tokens_per_micro_batch=32"))
    batch = traced.args_info[0][2].packed
    assert batch.tokens.shape == (4, 4, 8) and batch.places.shape == (16, 3)


@pytest.mark.campaign
@pytest.mark.parametrize("packs", [False, True])
def test_minibatches_are_compiled_as_they_are_run(planned, packs):
    options = ["training.updates_per_batch=2", "training.minibatches=2", "algorithm.preset=tis"]
    options += ["training.tokens_per_micro_batch=32"] * packs
    made = planned("rollout.prompts_per_step=12", *options)  # halves of 6, on four devices: 8 each
    _, batch, layout, context = ahead.traced_update(made).args_info[0]
    assert batch.prompts.shape[0] == 16 and layout.rows.shape == (64,) and layout.minibatches == 2
    assert context.proximal_logprobs.shape == batch.completions.shape
    if packs:
        assert layout.packed.tokens.shape == (8, 4, 8) and layout.packed.places.shape == (64, 3)
    of_layout, params, scored = ahead.traced_score(made).args_info[0]
    assert str((of_layout, scored)) == str((layout, batch)) and jax.tree.structure(params).num_leaves > 5
    one = planned("training.updates_per_batch=2")
    _, _, layout, context = ahead.traced_update(one).args_info[0]
    assert layout.rows is None is context.proximal_logprobs


@pytest.mark.campaign
def test_weights_at_the_start_count_where_they_are_read(planned):
    start, kl = "trained parameters as they were at the start", "algorithm.reference_kl={coefficient: 0.1}"
    assert start not in planned().held and start not in ahead.arguments_of(
        planned("evaluation.initial_kl=true"), "update"
    )
    assert start in planned("evaluation.initial_kl=true").held and start in ahead.arguments_of(planned(kl), "update")
    offline = planned(kl, "regime.offline=true")  # the sampler's are the same arrays
    assert start in ahead.arguments_of(offline, "update") and start in ahead.arguments_of(offline, "sample")
    assert "sampler's copy" not in offline.held
    assert ahead.traced_update(planned(kl)).args_info[0][3].reference_params is not None


@pytest.mark.campaign
def test_only_a_lagging_sampler_needs_a_copy(planned):
    def sampler(*options):
        return next(iter(ahead.arguments_of(planned(*options), "sample")))

    assert (
        sampler("regime.sync_interval=2")
        == sampler("regime.sync_interval=2", "model.dtype=bfloat16")
        == "sampler's copy"
    )
    assert sampler("regime.sync_interval=1", "model.dtype=float32") == "trained parameters"
    cast = planned("regime.sync_interval=1", "model.dtype=bfloat16")
    assert next(iter(ahead.arguments_of(cast, "sample"))) == "weights as they compute"
    peaks = phase_bytes(compile_check.compiled_items(cast, {"sample": ahead.Program(7, 0.0)}))
    assert peaks["sample"] == bytes_on_device((cast.held, cast.sampler)) + 7


@pytest.mark.campaign
def test_batches_are_filled_up_as_in_a_run(planned):
    made = planned("rollout.prompts_per_step=6", "training.micro_batch_prompts=3")  # two parts, four devices
    assert ahead.traced_update(made).args_info[0][1].prompts.shape[0] == 8
    assert ahead.padded_prompts(planned("rollout.prompts_per_step=9")) == 12


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        ("RESOURCE_EXHAUSTED: the total memory required (1.50G) exceeds available HBM (15.75G).", 1.5 * GIB),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50M of 15.75G hbm.", 20.5 * 2**20),
        ("RESOURCE_EXHAUSTED: something else", 0),
    ],
)
def test_the_compilers_own_number_is_read(message, needed):
    assert ahead.needed_by(message) == needed


@pytest.mark.parametrize(
    ("topology", "options", "reason"),
    [
        ("v9:4x4", [], "--topology = 'v9:4x4': is unknown; give host, GENERATION"),
        ("host", ["mesh.data=3"], "3 does not equal the number of devices, 4"),
        ("host", ["mesh.data=1", "mesh.tensor=4"], "mesh.tensor = 4: does not divide the model's 2 attention heads"),
        ("host", ["model.decoder=null", "model.path=/nowhere", "rollout.max_prompt_tokens=8"], "/nowhere"),
        ("host", ["model.remat=some"], "model.remat = 'some'"),
        ("host", ["training.tokens_per_micro_batch=2"], "training.tokens_per_micro_batch = 2"),
    ],
)
def test_invalid_arguments_are_status_2_with_the_reason(file, capsys, topology, options, reason):
    assert compile_check.check(file, topology, ["output=x", *options]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.campaign
@pytest.mark.skipif(not has_gpu_compiler(), reason='needs JAX\'s CUDA plugin, of pip install -e ".[cuda]"; no GPU')
def test_gpus_that_are_not_here_are_compiled_for(file, capsys):
    assert compile_check.check(file, "h100:4", ["output=x", "mesh.fsdp=2", "model.attention=plain"]) == 0
    printed = capsys.readouterr().out
    assert "4 devices (NVIDIA h100-80) of 55.88 GiB as data 2 × fsdp 2 × tensor 1" in printed
    assert "compute in bfloat16" in printed and "fits h100:4" in printed


@pytest.mark.campaign
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='needs libtpu, of pip install -e ".[tpu]"; no TPU'
)
def test_a_slice_that_is_not_here_is_compiled_for(file, capsys):
    assert compile_check.check(file, "v5e:2x2", ["output=x", "mesh.fsdp=2"]) == 0
    printed = capsys.readouterr().out
    assert "4 devices (TPU v5 lite) of 15.75 GiB as data 2 × fsdp 2 × tensor 1" in printed
    assert "compute in bfloat16" in printed and "fits v5e:2x2" in printed
