"""The initial policy of a run: decoder, parameters and tokenizer, loaded or made from the config."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from transformers import PreTrainedTokenizerBase

from recjax.config import Config
from recjax.models.decoder import Decoder, DecoderConfig, init_params
from recjax.models.tokenizers import character_tokenizer, load_tokenizer, stop_token_ids
from recjax.models.weights import load_pretrained


class Policy(NamedTuple):
    """Everything about a policy that training does not change; parameters travel beside it."""

    decoder: Decoder
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]


def load_policy(config: Config, characters: str) -> tuple[Policy, dict]:
    """The policy that `model` describes and its float32 parameters.

    Args:
        characters: what the built-in tokenizer must know, for a decoder made from scratch.
    """
    if config.model.path:
        decoder_config, params = load_pretrained(config.model.path)
        tokenizer = load_tokenizer(config.model.path)
    else:
        tokenizer = character_tokenizer(characters)
        shape = config.model.decoder
        decoder_config = DecoderConfig(
            vocab_size=len(tokenizer),
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.hidden_size // shape.num_heads,
        )
        params = init_params(decoder_config, jax.random.fold_in(jax.random.key(config.seed), 0))
    decoder = Decoder(decoder_config, _compute_dtype(config.model.dtype), config.model.remat)
    return Policy(decoder, tokenizer, stop_token_ids(tokenizer, config.rollout.stop, config.model.path)), params


def _compute_dtype(name: str) -> jnp.dtype:
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)
