"""What one batch comes to on a mesh: completions, and an update's losses, gradients and state.

python -m tests.training.on_mesh FILE.npz writes the numbers of a mesh of 8 devices.
"""

import contextlib
import dataclasses
import os
import sys

if __name__ == "__main__":
    os.environ |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}

import jax
import jax.numpy as jnp
import numpy as np
import optax

from recjax.algorithms.losses import Algorithm
from recjax.algorithms.presets import build_algorithm
from recjax.config import MeshConfig
from recjax.experience.batch import Batch
from recjax.experience.layout import Layout
from recjax.experience.packing import RowShape, pack
from recjax.models.decoder import Decoder, init_params
from recjax.models.decoder_config import DecoderConfig, DeltaNet, ExpertOptions, Lora
from recjax.models.logprobs import Sampling
from recjax.models.placement import on_host, put_rows, row_shards
from recjax.models.trainable import flatten
from recjax.training.mesh import make_mesh
from recjax.training.update import Recipe, TokenResults, TrainState, UpdateContext, first_state, update
from tests.rollout.padded import engine_completions

# Four heads over two of keys and values, thirteen tokens: tensor = 4 splits some of these and not others.
CONFIG = DecoderConfig(13, 16, 32, 2, 4, 2, 4, tie_embeddings=False, qkv_bias=True)
EXPERTS = dataclasses.replace(
    CONFIG, experts=ExpertOptions(4, 2, True), lora=Lora(2, 3.0, ("query", "gate", "up", "down"))
)
HYBRID = dataclasses.replace(
    CONFIG, gated_attention=True, num_layers=4, delta=DeltaNet((True, False, True, False), 2, 4, 4, 6, 3)
)
PROMPTS, GROUP, TIME = 3, 4, 6  # three prompts: no mesh divides them
# A reference, an entropy bonus and a random drop: everything that an update can read.
ALGORITHM = build_algorithm(
    "red_drop", {"reference_kl": {"coefficient": 0.1, "estimator": "k3"}, "entropy": {"coefficient": 0.01}}
)
OPTIMIZER = optax.adam(0.1)


@contextlib.contextmanager
def on(sizes: tuple[int, ...] | None):
    """A mesh of as many devices as the sizes of "data", "fsdp", "tensor", "expert" ask for, in context; None: none."""
    if sizes is None:
        yield
    else:
        with jax.set_mesh(
            make_mesh(
                MeshConfig(**dict(zip(("data", "fsdp", "tensor", "expert"), sizes, strict=False))),
                jax.devices()[: int(np.prod(sizes))],
            )
        ):
            yield


def start(config: DecoderConfig = CONFIG, optimizer: optax.GradientTransformation = OPTIMIZER) -> TrainState:
    """Fresh parameters, where the mesh in context has them."""
    return first_state(optimizer, init_params(config, jax.random.key(0)))


def batch_of(generator: np.random.Generator) -> Batch:
    """Random completions of random lengths."""
    rows = PROMPTS * GROUP
    return Batch(
        prompts=generator.integers(0, 13, (PROMPTS, 5)).astype(np.int32),
        prompt_mask=np.arange(5) < generator.integers(1, 6, (PROMPTS, 1)),
        completions=generator.integers(0, 13, (rows, TIME)).astype(np.int32),
        completion_mask=np.arange(TIME) < generator.integers(1, TIME + 1, (rows, 1)),
        behavior_logprobs=generator.normal(-2.5, 0.3, (rows, TIME)).astype(np.float32),
        rewards=generator.integers(0, 4, rows).astype(np.float32),
        group_ids=np.repeat(np.arange(PROMPTS, dtype=np.int32), GROUP),
        policy_version=np.zeros(rows, np.int32),
        truncated=np.zeros(rows, bool),
        accurate=np.zeros(rows, bool),
        reward_parts={},
    )


def filled_up(batch: Batch, multiple: int) -> Batch:
    """The batch with prompts behind it up to a multiple of their number; their rows have no token."""
    missing, count = -len(batch.prompts) % multiple, len(batch.prompts)

    def more(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.zeros((missing * len(x) // count, *x.shape[1:]), x.dtype)])

    filled = jax.tree.map(more, batch)
    filled.prompt_mask[count:, 0] = True
    return filled._replace(group_ids=np.repeat(np.arange(count + missing, dtype=np.int32), GROUP))


def drawn(
    batch: Batch, temperature: float, slots: int | None = None, config: DecoderConfig = CONFIG
) -> dict[str, np.ndarray]:
    """Completions of the batch's prompts, by what they are of."""
    options = {"group_size": GROUP, "max_tokens": TIME, "sampling": Sampling(temperature), "stop_ids": (1,)}
    params = init_params(config, jax.random.key(0))
    asked = batch.prompts, batch.prompt_mask, jax.random.key(5)
    return engine_completions(Decoder(config), params, *asked, **options, slots=slots)._asdict()


def updated(
    batch: Batch,
    micro_batches: int,
    packed: bool = False,
    config: DecoderConfig = CONFIG,
    algorithm: Algorithm = ALGORITHM,
    optimizer: optax.GradientTransformation = OPTIMIZER,
) -> tuple[TrainState, dict, TokenResults]:
    """State and metrics after a step on the batch, filled up as the loop does it."""
    state = start(config, optimizer)
    reference = jax.tree.map(lambda x: x * 1.1, state.params)
    batch = filled_up(batch, micro_batches * row_shards())
    # Rows for every share of them, which the loop sees to as well.
    shape = RowShape(rows=-(-3 // row_shards()) * row_shards(), tokens=12)
    has_teacher = algorithm.teacher_divergence is not None
    return update(
        state,
        put_rows(batch),
        Layout(1, pack(batch, shape)) if packed else Layout(micro_batches),
        UpdateContext(
            {},
            jax.random.key(1),
            reference_params=reference,
            teacher_params=init_params(config, jax.random.key(2)) if has_teacher else None,
        ),
        recipe=Recipe(
            Decoder(config),
            algorithm,
            optimizer,
            Sampling(0.9),
            7,
            Decoder(config) if has_teacher else None,
            expert_balance=0.1 if config.experts else 0.0,
        ),
    )


def numbers(
    sizes: tuple[int, ...] | None,
    micro_batches: int,
    packed: bool = False,
    config: DecoderConfig = CONFIG,
    algorithm: Algorithm = ALGORITHM,
) -> dict[str, np.ndarray]:
    """Everything on a mesh, by name, as host arrays; Adam's first moment after a step is a tenth of the gradient."""
    batch = batch_of(np.random.default_rng(0))
    with on(sizes):
        state, metrics, _ = updated(batch, micro_batches, packed, config, algorithm)
        found = {f"metrics/{name}": value for name, value in on_host(metrics).items()}
        found |= {f"gradient/{path}": 10 * leaf for path, leaf in flatten(on_host(state.optimizer_state[0].mu)).items()}
        found |= {f"params/{path}": leaf for path, leaf in flatten(on_host(state.params)).items()}
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            found |= {f"{name}/{key}": value for key, value in drawn(batch, temperature, config=config).items()}
    return found


def under_pmap(
    devices: int, batch: Batch | None = None, optimizer: optax.GradientTransformation = OPTIMIZER
) -> tuple[TrainState, dict, TokenResults]:
    """State and metrics after a step on the batch, prompts filled up and shared out by jax.pmap."""
    batch = filled_up(batch or batch_of(np.random.default_rng(0)), devices)
    state = start(optimizer=optimizer)
    reference = jax.tree.map(lambda x: x * 1.1, state.params)

    def own_update(state, reference, batch, key):
        return update(
            state,
            batch,
            Layout(),
            UpdateContext({}, key, reference_params=reference),
            recipe=Recipe(Decoder(CONFIG), ALGORITHM, optimizer, Sampling(0.9), 7),
            axis_name="devices",
        )

    shared = jax.tree.map(lambda x: jnp.reshape(x, (devices, -1, *x.shape[1:])), batch)
    step = jax.pmap(own_update, axis_name="devices", in_axes=(None, None, 0, None), out_axes=None)
    return step(state, reference, shared, jax.random.key(1))


if __name__ == "__main__":
    np.savez(sys.argv[1], **numbers((2, 2, 2), 2))
