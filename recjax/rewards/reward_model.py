"""Rewards from a sequence classifier in a Hugging Face folder, computed by recjax's decoder."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jaxtyping import Array, Bool, Float, Int

from recjax.errors import UserError
from recjax.hub.chat_rendering import render_chats
from recjax.hub.policy import attention_kernel
from recjax.hub.tokenizers import encode_prompts, load_tokenizer, model_folder
from recjax.hub.weights import MODEL_FILES, classifier_config, read_params
from recjax.models.decoder import Decoder
from recjax.models.logprobs import last_hidden
from recjax.models.products import product
from recjax.models.trainable import in_compute_dtype

# tokens of a batch, with padding, if its longest text has no more; its shortest rows
_TOKENS = 4096
_SHORTEST = 64


class RewardModel:
    """A reward function: the classifier's score of each prompt with its completion, as transformers computes it.

    The classifier's own chat template renders chats, with the completion as the assistant's message; a prompt that is
    text is the user's message, if there is a template. The first call reads the weights; a copy in another process
    reads its own.
    """

    def __init__(self, path: str, device: str = "auto"):
        """Checks config and tokenizer of a folder or hub name.

        Args:
            device: auto or cpu, see `task.reward_device`.
        Raises:
            UserError: recjax cannot compute the classifier; the message says why.
        """
        self._path = path
        self._device = device
        self._loaded = None
        try:
            self._config, self._pad = classifier_config(path)
            self._tokenizer = load_tokenizer(path)
        except UserError as error:
            raise UserError("task.reward", str(error), value=f"model:{path}") from error

    def __getstate__(self) -> dict[str, Any]:
        """The state without the weights."""
        return vars(self) | {"_loaded": None}

    def __call__(
        self, prompts: Sequence[str | list[dict[str, str]]], completions: Sequence[str], answers: Sequence[str]
    ) -> list[float]:
        """Scores of the completions; `answers` are not read."""
        chats = []
        for prompt, text in zip(prompts, completions, strict=True):
            if isinstance(prompt, str):
                messages = [{"role": "user", "content": prompt}]
            else:
                messages = prompt
            chats.append([*messages, {"role": "assistant", "content": text}])
        is_chat = self._tokenizer.chat_template is not None or not all(isinstance(prompt, str) for prompt in prompts)
        if is_chat:
            texts = render_chats(self._tokenizer, chats, asks=False)
        else:
            texts = [str(prompt) + text for prompt, text in zip(prompts, completions, strict=True)]
        encoded = encode_prompts(self._tokenizer, texts, rendered=is_chat, vocabulary=self._config.vocab_size)
        order = sorted(range(len(encoded)), key=lambda index: -len(encoded[index]))
        scores = np.zeros(len(encoded))
        device = jax.local_devices(backend="cpu" if self._device == "cpu" else None)[0]
        mesh = jax.make_mesh((1,) * 3, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3, devices=[device])
        with jax.set_mesh(mesh):
            if self._loaded is None:
                params = read_params(model_folder(self._path, MODEL_FILES), self._config, scores=True)
                dtype = jnp.dtype("float32" if device.platform == "cpu" else "bfloat16")
                kernel = attention_kernel("auto", self._config, dtype, device)
                decoder = Decoder(self._config, dtype, attention=kernel)
                self._loaded = decoder, in_compute_dtype(decoder, params, copy=False)
            while order:
                # Powers of two, so that few programs serve all batches.
                time = max(_SHORTEST, 2 ** (len(encoded[order[0]]) - 1).bit_length())
                rows = min(max(1, _TOKENS // time), 2 ** (len(order) - 1).bit_length())
                chosen = order[:rows]
                order = order[rows:]
                tokens = np.zeros((rows, time), np.int32)
                mask = np.tile(np.arange(time) < 1, (rows, 1))
                for row, index in enumerate(chosen):
                    ids = np.array(encoded[index], np.int32)
                    tokens[row, : len(ids)] = ids
                    # transformers takes the score at the last non-padding token, even where the text itself ends with
                    # the padding token.
                    last = np.max(np.flatnonzero(ids != self._pad), initial=0)
                    mask[row, : last + 1] = True
                batch_scores = _scores(*self._loaded, tokens, mask)
                scores[chosen] = jax.device_get(batch_scores)[: len(chosen)]
        return scores.tolist()


@functools.partial(jax.jit, static_argnames="decoder")
def _scores(
    decoder: Decoder, params: dict, tokens: Int[Array, "rows time"], mask: Bool[Array, "rows time"]
) -> Float[Array, " rows"]:
    """The score at the last token in `mask`; later tokens do not matter."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = decoder.apply({"params": params}, tokens, positions, mask)
    return product("re,ev->rv", last_hidden(hidden, mask), params["score"]["kernel"], jnp.float32)[:, 0]
