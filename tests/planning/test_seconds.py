"""Expected seconds of a step: the committed measurements are met, and the estimate follows the work."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import step_seconds
from recjax.config import load_config
from recjax.models.decoder import Decoder
from recjax.models.decoder_config import DecoderConfig
from recjax.planning import seconds
from recjax.planning.dry_run import dry_run, print_dry_run
from recjax.planning.seconds import BatchSize, Measured, NoEstimate, Work, expected_seconds, predicted_seconds
from recjax.planning.targets import named_devices
from tests.training.tiny_run import TINY

DEVICES = seconds.measured_devices()
STEPS = [(name, place) for name, device in DEVICES.items() for place in range(len(device.measured))]
SHAPE = DecoderConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=1024,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
)
BATCH = BatchSize(prompts=8, group_size=8, prompt_tokens=64, completion_tokens=64)
CPU = next(iter(name for name, device in DEVICES.items() if device.flops is None))


@pytest.fixture
def config_of(tmp_path):
    """A function from overrides to a config of the tiny run."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    return lambda *overrides: load_config(tmp_path / "tiny.yaml", [f"output={tmp_path / 'run'}", *overrides])


@pytest.fixture
def on_measured_cpu(monkeypatch):
    """This machine is the measured CPU."""
    monkeypatch.setattr(seconds, "this_device", lambda: CPU)


def test_committed_measurements_are_those_of_their_files():
    assert seconds.FILE.read_text(encoding="utf-8") == step_seconds.text()


@pytest.mark.parametrize(("name", "place"), STEPS)
def test_measured_steps_lie_in_their_range(name, place):
    step = DEVICES[name].measured[place]
    found = predicted_seconds(DEVICES[name], step.work)
    assert found.lowest <= sum(step.seconds) <= found.highest
    assert found.lowest < found.expected < found.highest


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("field", BatchSize._fields)
def test_larger_batches_take_longer(name, field):
    decoder = Decoder(SHAPE, jnp.dtype(DEVICES[name].precision))
    larger = BATCH._replace(**{field: 2 * getattr(BATCH, field)})
    before, after = (
        predicted_seconds(DEVICES[name], seconds.step_work(decoder, batch)).expected for batch in (BATCH, larger)
    )
    assert before < after


@pytest.mark.parametrize("field", ["hidden_size", "num_layers", "intermediate_size"])
def test_larger_models_take_longer(field):
    larger = dataclasses.replace(SHAPE, **{field: 2 * getattr(SHAPE, field)})
    for device in DEVICES.values():
        before, after = (
            predicted_seconds(device, seconds.step_work(Decoder(shape, jnp.dtype(device.precision)), BATCH)).expected
            for shape in (SHAPE, larger)
        )
        assert before < after


def made_up(prices: Work, count: int = 8, slower: float = 1.0) -> seconds.DeviceSpeed:
    """A device whose steps cost exactly these prices, except for the last one."""
    random = np.random.default_rng(0)
    measured = []
    for _ in range(count):
        work = Work(*np.exp(random.normal(0.0, 1.0, len(Work._fields) - 1)))
        measured.append(Measured(work, (float(np.dot(work, prices)),)))
    measured[-1] = measured[-1]._replace(seconds=(slower * measured[-1].seconds[0],))
    return seconds.DeviceSpeed(f"made up {slower}", "float32", "today", "", None, None, tuple(measured))


PRICES = Work(sampled_flops=1.0, update_flops=0.5, bytes=0.0, activations=2.0, calls=0.3, steps=0.1)


def test_exact_prices_are_found_without_error():
    device = made_up(PRICES)
    work = Work(3.0, 1.0, 2.0, 5.0, 4.0)
    found = predicted_seconds(device, work)
    assert found.expected == pytest.approx(np.dot(work, PRICES))
    assert (found.lowest, found.highest) == pytest.approx((found.expected, found.expected))


def test_range_has_the_error_of_an_unseen_step():
    device = made_up(PRICES, slower=2.0)
    low, high = seconds.errors(device)
    assert low <= 1.0
    assert high >= 2.0 - 1e-6


def test_unknown_devices_get_no_number(config_of, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(seconds, "this_device", lambda: "a CPU that nobody has measured")
    result = dry_run(config_of())
    assert result.step_seconds is None
    print_dry_run(str(tmp_path / "tiny.yaml"), [f"output={tmp_path / 'run'}"])
    printed = capsys.readouterr().out
    assert f"no measured steps of a CPU that nobody has measured; {seconds.COMMAND} measures them" in printed
    assert "a step takes" not in printed


@pytest.mark.parametrize(
    ("overrides", "device", "reason"),
    [
        ([], "h100-80:8", "only steps of one device"),
        ([], "a100-80", "no measured steps of a100-80"),
        (["model.dtype=bfloat16"], None, "measured in float32, not bfloat16"),
        (["regime={mode: async, max_staleness: 1}"], None, "samples in other processes"),
        (["rollout.prompts_per_step=1", "rollout.group_size=2"], "h200-141", "much smaller"),
    ],
)
def test_unmeasured_kinds_of_runs_get_no_number(config_of, on_measured_cpu, overrides, device, reason):
    config = config_of(*overrides)
    devices = named_devices(device) if device else None
    if device:
        config = config.replace(**{"model.dtype": "bfloat16"})
    result = dry_run(config, devices)
    assert result.step_seconds is None
    assert any(reason in note for note in result.notes)


def seconds_of(config, slots=None):
    model = dry_run(config).model
    return expected_seconds(config, model, 8, seconds.device_speed(config, model, None), slots)


@pytest.fixture
def any_size(monkeypatch, on_measured_cpu):
    """Steps below the smallest measured one have an estimate, too."""
    monkeypatch.setattr(seconds, "SMALL", 0.0)


def test_estimate_follows_what_a_step_computes(config_of, any_size):
    wide = ["model.decoder={hidden_size: 256, num_layers: 4}", "rollout.max_completion_tokens=64"]
    plain = seconds_of(config_of(*wide))
    adapters = seconds_of(config_of(*wide, "model.lora={rank: 2, alpha: 4, targets: [query]}"))
    anchored = seconds_of(config_of(*wide, "algorithm.reference_kl={coefficient: 0.1}"))
    assert adapters.expected < plain.expected < anchored.expected
    assert adapters.unmeasured == ("frozen weights",)
    assert anchored.unmeasured == ("reference policy",)
    assert plain.unmeasured == ()


def test_few_slots_take_longer_and_repeated_updates_sample_once(config_of, any_size):
    config = config_of("rollout.max_completion_tokens=64")
    assert seconds_of(config, slots=1).expected > seconds_of(config).expected
    repeated = config_of("rollout.max_completion_tokens=64", "training={steps: 8, updates_per_batch: 4}")
    assert seconds_of(repeated).expected < seconds_of(config).expected


def test_dry_run_prints_seconds_with_their_range(config_of, any_size, capsys, tmp_path):
    print_dry_run(str(tmp_path / "tiny.yaml"), [f"output={config_of().output}"])
    found = dry_run(config_of()).step_seconds
    assert f"a step takes about {found.expected:.2g} s (from {found.lowest:.2g} to {found.highest:.2g})" in (
        capsys.readouterr().out
    )


def test_reasons_are_exceptions_of_their_own(config_of, on_measured_cpu):
    with pytest.raises(NoEstimate, match="an agent's turns"):
        seconds_of(config_of("task.agent=x:y", "rollout.max_context_tokens=64"))
