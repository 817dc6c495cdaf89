"""Expected seconds of a step: the work of the config's shapes, at the speed of measured steps of the same device.

`step_seconds.json` has the measurements. `python -m benchmarks.step_seconds` makes and collects them.
"""

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import nnls

from recjax.config import Config
from recjax.models.decoder_config import DecoderConfig
from recjax.planning.programs import Model
from recjax.planning.targets import ACCELERATORS, Devices
from recjax.rollout.plan import state_bytes
from recjax.runtime.workers import cores

FILE = Path(__file__).parent / "step_seconds.json"
COMMAND = "python -m benchmarks.step_seconds"
LEAST_MEASURED = 2  # measured shapes of a device, so that one can be predicted from the rest
FAR = 2.0  # an update with this many times the work of the largest measured one is beyond the measurements
SMALL = 0.25  # below this share of the smallest measured update's work, a step is mostly unmeasured work of the host


class BatchSize(NamedTuple):
    """Sizes of a batch whose completions all have `completion_tokens` tokens."""

    prompts: int
    group_size: int
    prompt_tokens: int
    completion_tokens: int


class Work(NamedTuple):
    """Work of one step on one device.

    Attributes:
        sampled_flops: floating-point operations of sampling's matmuls.
        update_flops: those of the update.
        bytes: bytes of weights, keys and values that sampling reads.
        activations: numbers that layers hand on in the update: tokens × layers × hidden size.
        calls: calls of a layer that sampling makes one after another: layers × tokens of the longest completion.
        steps: always 1; the constant part of a step.
    """

    sampled_flops: float
    update_flops: float
    bytes: float
    activations: float
    calls: float
    steps: float = 1.0


class Measured(NamedTuple):
    """A measured step: its work, and the seconds of sampling and update, or of both together.

    Attributes:
        seconds: one number for the whole step, or two, for sampling and update.
    """

    work: Work
    seconds: tuple[float, ...]


class DeviceSpeed(NamedTuple):
    """What is known about a device.

    Attributes:
        name: JAX's name of an accelerator, or `this_cpu` of a processor.
        precision: dtype of the measured matmuls.
        date: day of the measurement.
        remark: what differs from a run of the current version; "" if nothing does.
        flops, bytes: peaks of matmuls and memory in a second; None: fitted to the measurements.
    """

    name: str
    precision: str
    date: str
    remark: str
    flops: float | None
    bytes: float | None
    measured: tuple[Measured, ...]


class StepSeconds(NamedTuple):
    """Expected seconds of a step.

    Attributes:
        expected: seconds if all completions have the most tokens.
        lowest, highest: range by the errors for measured steps, each predicted from the device's other steps.
        device: the device's name and the measurements, in words.
        unmeasured: parts of the config that no measured step has.
    """

    expected: float
    lowest: float
    highest: float
    device: str
    unmeasured: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The seconds with their range, in words."""
        return f"about {self.expected:.2g} s (from {self.lowest:.2g} to {self.highest:.2g})"


class NoEstimate(Exception):
    """No measurement says how long a step takes; the text is the reason."""


# --- Work.


def forward_flops(shape: DecoderConfig, batch: BatchSize) -> float:
    """Floating-point operations of the matmuls of one forward pass that runs each prompt once for its group.

    Each token costs 2 a weight, and attention 4 a layer, head unit and pair of tokens. Attention within windows is not
    counted.
    """
    prompt = batch.prompt_tokens
    longest = batch.completion_tokens
    completion_tokens = batch.group_size * longest
    pairs = prompt**2 / 2 + completion_tokens * (prompt + longest / 2)
    if shape.windows:
        pairs = 0
    layers = shape.num_layers * shape.active_layer_weights
    head = shape.vocab_size * shape.hidden_size
    flops = 2 * (layers * (prompt + completion_tokens) + head * completion_tokens)
    flops += 4 * shape.attention_layers * shape.num_heads * shape.head_dim * pairs
    return batch.prompts * flops


def read_weights(shape: DecoderConfig, rows: int) -> float:
    """Number of weights that sampling one token of each of `rows` completions reads.

    They include the experts that any of the tokens needs: in expectation, with equal loads.
    """
    weights = shape.num_layers * shape.active_layer_weights + shape.vocab_size * shape.hidden_size
    if shape.experts and shape.experts.per_token < shape.experts.count:
        # With s the share of active experts and n tokens, 1 - (1 - s)ⁿ of the experts run; s are in `weights`.
        share = shape.experts.per_token / shape.experts.count
        weights += (1 - (1 - share) ** rows - share) / (1 - share) * shape.idle_weights
    return weights


def cache_bytes(decoder: Any, batch: BatchSize, size: int) -> float:
    """Bytes of keys, values and states that sampling one token of each completion reads, on average.

    Args:
        size: bytes of a number.
    """
    shape = decoder.config
    tokens = batch.prompt_tokens + batch.group_size * batch.completion_tokens / 2
    cached = 2 * shape.attention_layers * shape.num_kv_heads * shape.head_dim * size * tokens
    cached += 2 * state_bytes(decoder, batch.group_size)  # each token reads and writes them
    return batch.prompts * cached


def backward_share(config: Config, model: Model) -> float:
    """FLOPs of a backward pass, as a multiple of those of a forward pass: 2, or less with frozen weights."""
    shape = model.decoder.config
    weights = shape.num_layers * shape.active_layer_weights + shape.idle_weights + shape.vocab_size * shape.hidden_size
    trained = sum(leaf.size for leaf in jax.tree.leaves(model.trained))
    share = min(trained / weights, 1.0)
    if config.model.freeze:
        return 2 * share
    return 1 + share


def step_work(decoder: Any, batch: BatchSize, rounds: int = 1, backward: float = 2.0) -> Work:
    """Work of a step that samples a batch and makes one update of it.

    Args:
        rounds: completions that follow one another in a slot.
        backward: see `backward_share`.
    """
    shape = decoder.config
    size = jnp.dtype(decoder.dtype).itemsize
    rows = batch.prompts * batch.group_size
    forward = forward_flops(shape, batch)
    tokens = batch.prompts * batch.prompt_tokens + rows * batch.completion_tokens
    weights = rounds * read_weights(shape, math.ceil(rows / rounds)) * size
    return Work(
        sampled_flops=forward,
        update_flops=(1 + backward) * forward,
        bytes=batch.completion_tokens * (weights + cache_bytes(decoder, batch, size)),
        activations=float(tokens * shape.num_layers * shape.hidden_size),
        calls=float(rounds * batch.completion_tokens * shape.num_layers),
    )


# --- Measurements.


def this_cpu() -> str:
    """This machine's processor: vendor, family and model as Linux numbers them, and the cores of this process."""
    found: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            found.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    if "cpu family" not in found:
        return f"an unnamed CPU, {cores()} cores"
    return f"{found['vendor_id']} family {found['cpu family']} model {found['model']}, {cores()} cores"


def this_device() -> str:
    """The name of this machine's first device."""
    device = jax.local_devices()[0]
    return this_cpu() if device.platform == "cpu" else device.device_kind


@functools.cache
def measured_devices() -> dict[str, DeviceSpeed]:
    """The devices of step_seconds.json by name."""
    from recjax.models.decoder import Decoder

    devices = {}
    for name, content in json.loads(FILE.read_text(encoding="utf-8"))["devices"].items():
        measured = []
        for row in content["steps"]:
            decoder = Decoder(DecoderConfig(**row["model"]), jnp.dtype(content["precision"]))
            measured.append(Measured(step_work(decoder, BatchSize(**row["batch"])), tuple(row["seconds"])))
        devices[name] = DeviceSpeed(
            name=name,
            precision=content["precision"],
            date=content["date"],
            remark=content["remark"],
            flops=content["peak_flops"],
            bytes=content["peak_bytes"],
            measured=tuple(measured),
        )
    return devices


def named_device(devices: Devices | None) -> str:
    """The name in step_seconds.json of the devices to plan for; None: this machine's.

    Raises:
        NoEstimate: several devices.
    """
    if devices is None:
        return this_device()
    if devices.count > 1:
        raise NoEstimate("only steps of one device are measured")
    if devices.kind is None:
        return this_device()
    (accelerator,) = [name for name, kind in ACCELERATORS.items() if kind is devices.kind]
    for name, content in json.loads(FILE.read_text(encoding="utf-8"))["devices"].items():
        if content["accelerator"] == accelerator:
            return name
    return accelerator


# --- Fit.


def _parts(work: Work, device: DeviceSpeed, count: int) -> list[tuple[np.ndarray, float]]:
    """For the whole step, or for sampling and update: work that has a fitted price, and the seconds at the peaks.

    Args:
        count: number of parts.
    """
    sampling = work._replace(update_flops=0.0, activations=0.0, steps=0.0)
    parts = [work]
    if count == 2:
        parts = [sampling, Work(0.0, work.update_flops, 0.0, work.activations, 0.0, 0.0)]
    result = []
    for part in parts:
        if device.flops is None or device.bytes is None:
            # Bytes and FLOPs of decoding grow together, and no peak tells them apart.
            priced = part._replace(bytes=0.0)
            seconds = 0.0
        else:
            priced = Work(0.0, 0.0, 0.0, part.activations, part.calls, 0.0)
            seconds = (part.sampled_flops + part.update_flops) / device.flops + part.bytes / device.bytes
        result.append((np.array(priced), seconds))
    return result


def _prices(device: DeviceSpeed, measured: Sequence[Measured]) -> np.ndarray:
    """Seconds of a unit of each kind of work, not negative, with the least squared relative errors."""
    rows = []
    targets = []
    for step in measured:
        for (priced, fixed), seconds in zip(_parts(step.work, device, len(step.seconds)), step.seconds, strict=True):
            rows.append(priced / seconds)
            targets.append(max(1 - fixed / seconds, 0.0))
    matrix = np.array(rows)
    scale = matrix.max(axis=0)
    scale[scale == 0] = 1.0
    prices, _ = nnls(matrix / scale, np.array(targets))
    return prices / scale


def _predicted(work: Work, device: DeviceSpeed, prices: np.ndarray) -> float:
    """Seconds of a step's work."""
    ((priced, fixed),) = _parts(work, device, 1)
    return float(priced @ prices + fixed)


def part_errors(device: DeviceSpeed) -> list[float]:
    """Ratios of measured to predicted seconds of each part of each step, which is predicted from all other steps."""
    ratios = []
    for place, step in enumerate(device.measured):
        prices = _prices(device, device.measured[:place] + device.measured[place + 1 :])
        for (priced, fixed), seconds in zip(_parts(step.work, device, len(step.seconds)), step.seconds, strict=True):
            ratios.append(seconds / float(priced @ prices + fixed))
    return ratios


@functools.cache
def errors(device: DeviceSpeed) -> tuple[float, float]:
    """The lowest and the highest ratio of measured to predicted seconds.

    Devices with known peaks have few steps each, so they share their ratios.
    """
    alike = [device]
    if device.flops is not None:
        alike = [other for other in measured_devices().values() if other.flops is not None]
    ratios = [1.0]
    for other in alike:
        ratios += part_errors(other)
    return min(ratios), max(ratios)


def predicted_seconds(device: DeviceSpeed, work: Work) -> StepSeconds:
    """The expected seconds of a step's work on a measured device."""
    expected = _predicted(work, device, _prices(device, device.measured))
    low, high = errors(device)
    words = f"{device.name} ({len(device.measured)} measured shapes, {device.date}{device.remark})"
    return StepSeconds(expected, low * expected, high * expected, words)


# --- A config.


def device_speed(config: Config, model: Model, devices: Devices | None) -> DeviceSpeed:
    """The measurements by which the steps of a run can be estimated.

    Args:
        devices: devices to plan for; None: one of this machine's.
    Raises:
        NoEstimate: no measurement fits the device or the config.
    """
    _check_measured(config)
    name = named_device(devices)
    device = measured_devices().get(name)
    if device is None or len(device.measured) < LEAST_MEASURED:
        raise NoEstimate(f"no measured steps of {name}; {COMMAND} measures them")
    dtype = np.dtype(model.decoder.dtype).name
    if device.precision != dtype:
        raise NoEstimate(f"the steps of {name} are measured in {device.precision}, not {dtype}")
    return device


def expected_seconds(
    config: Config, model: Model, prompt_tokens: int, device: DeviceSpeed, slots: int | None
) -> StepSeconds:
    """Expected seconds of a step of a run with completions at their limit, without evaluations and checkpoints.

    Args:
        prompt_tokens: tokens of the longest prompt.
        slots: completions that are sampled at the same time; None: all of a batch.
    Raises:
        NoEstimate: the step is much smaller than every measured one.
    """
    rollout = config.rollout
    batch = BatchSize(
        prompts=rollout.prompts_per_step,
        group_size=rollout.group_size + rollout.oversample,
        prompt_tokens=prompt_tokens,
        completion_tokens=rollout.max_completion_tokens,
    )
    rows = batch.prompts * batch.group_size
    rounds = 1 if slots is None else math.ceil(rows / slots)
    work = step_work(model.decoder, batch, rounds, backward_share(config, model))
    unmeasured = []
    if config.model.lora or config.model.adapter or config.model.freeze:
        unmeasured.append("frozen weights")
    if model.decoder.config.experts or model.decoder.config.delta:
        unmeasured.append("experts or delta nets")
    if config.model.remat != "none":
        work = work._replace(update_flops=work.update_flops + work.sampled_flops)
        unmeasured.append(f"model.remat={config.model.remat}")
    if config.algorithm.build().needs_reference:
        work = work._replace(update_flops=work.update_flops + work.sampled_flops)
        unmeasured.append("reference policy")
    # A batch of several updates is sampled once.
    updates = config.training.updates
    minibatches = config.training.minibatches
    work = Work(
        sampled_flops=work.sampled_flops / updates,
        update_flops=work.update_flops / minibatches,
        bytes=work.bytes / updates,
        activations=work.activations / minibatches,
        calls=work.calls / updates,
    )
    smallest = min(step.work.update_flops for step in device.measured)
    if work.update_flops < SMALL * smallest:
        raise NoEstimate(f"it is much smaller than every measured step of {device.name}")
    largest = max(step.work.update_flops for step in device.measured)
    if work.update_flops > FAR * largest:
        unmeasured.append(f"update of this size (the largest has 1 / {work.update_flops / largest:.0f} of its work)")
    return predicted_seconds(device, work)._replace(unmeasured=tuple(unmeasured))


def _check_measured(config: Config) -> None:
    """Refuses configs whose step is not one batch sampled by this process and one update.

    Raises:
        NoEstimate: the reason.
    """
    if config.regime.mode == "async":
        raise NoEstimate("an asynchronous run samples in other processes")
    if config.rollout.engine:
        raise NoEstimate("another server samples")
    if config.task.agent:
        raise NoEstimate("the number of an agent's turns is unknown")
    if config.experience and (config.experience.store or config.experience.mix or config.experience.replay):
        raise NoEstimate("the lengths of stored or repeated completions are unknown")
    if config.model.teacher:
        raise NoEstimate("no step with a teacher is measured")
