"""The initial policy of a run: decoder, parameters and tokenizer, loaded from files or created from the config."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from transformers import PreTrainedTokenizerBase

from recjax.config import Config, DecoderShape, ModelConfig
from recjax.errors import UserError
from recjax.hub.chat_rendering import CHAT_DATE, set_template_kwargs
from recjax.hub.tokenizers import character_tokenizer, load_tokenizer, stop_token_ids
from recjax.hub.weights import load_adapter, load_pretrained, pretrained_config
from recjax.models.attention import MEASURED
from recjax.models.decoder import Decoder, init_params
from recjax.models.decoder_config import DecoderConfig
from recjax.models.placement import put_params
from recjax.models.products import JOIN
from recjax.models.sampling import TokenRecord
from recjax.models.trainable import adapted, combine, merged

logger = logging.getLogger(__name__)


class Policy(NamedTuple):
    """The parts of a policy that training does not change; the parameters are kept separately.

    slots: number of completions that the engine decodes at a time; None: as many as fit in memory.
    recording: arrays that the sampler records.
    """

    decoder: Decoder
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    slots: int | None = None
    recording: TokenRecord = TokenRecord()

    @property
    def vocabulary(self) -> int:
        """Number of the embedding's rows, which may differ from the tokenizer's size.

        The tokenizer's size if the policy has no decoder.
        """
        return len(self.tokenizer) if self.decoder is None else self.decoder.config.vocab_size


def load_params(config: Config, decoder_config: DecoderConfig) -> dict:
    """The float32 parameters of the policy that `model` describes, without adapters; `merge_adapter` merges them.

    Args:
        decoder_config: decoder config that `policy_alone` made.
    """
    if config.model.path:
        params = load_pretrained(config.model.path)[1]
        if config.model.merge_adapter:
            assert config.model.adapter is not None
            lora, adapters = load_adapter(config.model.adapter, decoder_config)
            params = merged(adapted(decoder_config, lora), combine(params, put_params(adapters)))
        return params
    return init_params(decoder_config, jax.random.fold_in(jax.random.key(config.seed_of_base), 0))


def policy_alone(config: Config, characters: str) -> Policy:
    """The policy that `model` describes; reads and creates no parameters.

    Args:
        characters: alphabet of the built-in tokenizer, for a decoder made from scratch.
    """
    if config.model.path:
        decoder_config = pretrained_config(config.model.path)
        tokenizer = load_tokenizer(config.model.path, config.model.chat_date)
        set_template_kwargs(tokenizer, config.model.chat_template_kwargs)
        date = tokenizer.init_kwargs.get(CHAT_DATE)
        if date:
            logger.info(
                "the chat template of %s reads the clock: all prompts get the date %s (model.chat_date)",
                config.model.path,
                date,
            )
    else:
        assert config.model.decoder is not None
        tokenizer = character_tokenizer(config.model.decoder.characters or characters)
        decoder_config = scratch_config(config.model.decoder, len(tokenizer))
    dtype = compute_dtype(config.model.dtype)
    warn_if_slow(config.model.dtype)
    if config.training.expert_balance and decoder_config.experts is None:
        raise UserError(
            "training.expert_balance",
            f"{config.model.path or 'model.decoder'} has no experts",
            "remove this key",
            value=config.training.expert_balance,
        )
    options = kernel_options(config.model, decoder_config, dtype)
    replays_routing = config.rollout.record_routing
    decoder = Decoder(decoder_config, dtype, config.model.remat, replays_routing=replays_routing, **options)
    stop_ids = stop_token_ids(tokenizer, config.rollout.stop, config.model.path)
    unknown = [token for token in stop_ids if token >= decoder_config.vocab_size]
    if unknown:
        effect = f"the token {unknown[0]} ends no completion"
        if len(unknown) == len(stop_ids):
            effect = "no completion ends before its limit"
        logger.warning(
            "%s: %s, because the embedding has %d tokens and the stop ids are %s",
            config.model.path,
            effect,
            decoder_config.vocab_size,
            stop_ids,
        )
    return Policy(decoder, tokenizer, stop_ids, config.rollout.slots, config.recording())


class Teacher(NamedTuple):
    """A model whose log-probs the policy learns from, with all its parameters in the compute dtype."""

    decoder: Decoder
    params: dict


def scratch_config(shape: DecoderShape, vocabulary: int) -> DecoderConfig:
    """The decoder config that `model.decoder` describes, for `vocabulary` tokens."""
    head_dim = shape.hidden_size // shape.num_heads
    return DecoderConfig(vocab_size=vocabulary, head_dim=head_dim, **shape.model_dump(exclude={"characters"}))


def warn_if_slow(name: str) -> None:
    """Warns if this machine computes the dtype of a `model.dtype` more slowly than float32."""
    if name == "bfloat16" and jax.default_backend() == "cpu" and not cpu_has_bfloat16():
        logger.warning("model.dtype = bfloat16: this CPU lacks bfloat16 instructions; float32 is faster")


def compute_dtype(name: str) -> jnp.dtype:
    """The compute dtype for `model.dtype` on this machine's devices; logs on a CPU if bfloat16 is fast."""
    if jax.default_backend() != "cpu":
        return jnp.dtype("bfloat16" if name == "auto" else name)
    is_fast = cpu_has_bfloat16()
    if name == "auto":
        logger.info(
            "model.dtype = auto: float32, the default on CPUs; this CPU %s",
            "has bfloat16 instructions; model.dtype=bfloat16 may be faster" if is_fast else "lacks bfloat16",
        )
        return jnp.dtype("float32")
    return jnp.dtype(name)


def cpu_has_bfloat16() -> bool:
    """True if /proc/cpuinfo lists instructions that multiply bfloat16 numbers (AVX-512, AMX or Arm)."""
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return False
    return not words.isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


def kernel_options(
    model: ModelConfig, config: DecoderConfig, dtype: jnp.dtype, device: jax.Device | None = None
) -> dict[str, Any]:
    """The `Decoder` options that choose its kernels.

    Args:
        device: device that runs the kernels; None: the first device of this machine.
    Raises:
        UserError: the device does not run what the config asks for; the message says why.
    """
    device = jax.devices()[0] if device is None else device
    platforms = ["cuda", "rocm"] if device.platform == "gpu" else [device.platform]
    if model.joined_projections and not any(platform in JOIN for platform in platforms):
        raise UserError(
            problem="model.joined_projections = True needs a GPU",
            remedy=f"this is {device.device_kind}. Set it to false",
        )
    kernel = attention_kernel(model.attention, config, dtype, device)
    return {"attention": kernel, "joined_projections": model.joined_projections}


def attention_kernel(name: str, config: DecoderConfig, dtype: jnp.dtype, device: jax.Device | None = None) -> str:
    """The kernel of recjax.models.attention for `model.attention`; resolves "auto".

    Args:
        device: device that runs the kernel; None: the first device of this machine.
    Raises:
        UserError: the kernel does not run on the device or does not support the model; the message says why.
    """
    device = jax.devices()[0] if device is None else device
    if name == "auto":
        return next(kernel for kernel in MEASURED if not _missing(kernel, config, dtype, device))
    missing = _missing(name, config, dtype, device)
    if missing:
        raise UserError(
            "model.attention",
            f"needs {' and '.join(missing)}",
            f"this is {device.device_kind} with {dtype} and heads of {config.head_dim}. Set it to plain, or to auto",
            value=name,
        )
    return name


def _missing(kernel: str, config: DecoderConfig, dtype: jnp.dtype, device: jax.Device) -> list[str]:
    """The needs of an attention kernel that this device and this model do not meet."""
    missing = []
    if kernel in ("cudnn", "cudnn_lengths"):
        is_nvidia = device.platform == "gpu" and "nvidia" in device.device_kind.lower()
        if not is_nvidia or float(device.compute_capability) < 8.0:
            missing.append("an NVIDIA GPU of compute capability 8.0 or more")
        if dtype != jnp.bfloat16:
            missing.append("model.dtype=bfloat16")
        if config.head_dim % 8 or config.head_dim > 128:
            missing.append("heads of a multiple of 8, at most 128")
        if config.attention_cap is not None:
            missing.append("a model without a bound on attention scores")
    if kernel == "splash":
        if device.platform != "tpu":
            missing.append("a TPU")
        if config.windows:
            missing.append("a model without windows")
    return missing
