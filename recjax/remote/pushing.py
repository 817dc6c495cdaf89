"""Writes a policy's weights as a folder that a server loads: a complete model, or adapters for the server's model."""

import dataclasses
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

from recjax.config import Config
from recjax.hub.export import export_model, write_adapters, write_base
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import model_folder
from recjax.models.trainable import merged
from recjax.runtime.files import digest, whole_folder


def pushed_folder(config: Config) -> Path:
    """The folder with the weights of all versions that a run has pushed."""
    output = Path(config.output).absolute()
    assert config.rollout.engine is not None
    if not config.rollout.engine.folder:
        return output / "pushed"
    # Other runs may push into the engine's folder as well.
    return Path(config.rollout.engine.folder).absolute() / f"{output.name}-{digest(bytes(output))[:8]}"


def takes_adapters(config: Config, api: str) -> bool:
    """True if a server gets adapters alone, because it has the base model."""
    return config.model.lora is not None and config.model.path is not None and api != "recjax"


def write_pushed(folder: Path, config: Config, policy: Policy, params: dict, api: str) -> None:
    """Writes the folder that a server loads.

    Args:
        folder: replaced if an interrupted attempt has left it.
        params: all parameters, on the host.
        api: the server's software, see `RemoteServer`.
    """
    decoder = policy.decoder.config
    path = config.model.path
    shutil.rmtree(folder, ignore_errors=True)
    # Adapters are merged in float32: a sum in the compute dtype would round twice.
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    if takes_adapters(config, api):
        with whole_folder(folder) as partial:
            write_adapters(partial, decoder, params, str(model_folder(str(path))))
        return
    if config.model.lora:
        params = merged(decoder, params)
    decoder = dataclasses.replace(decoder, lora=None)
    if api == "vllm" and decoder.tie_embeddings and decoder.attention_cap is None:
        # vLLM's build for CPUs packs weights as it loads them, and keeps the former output layer of tied
        # embeddings unless the folder has one. Gemma 2, which alone bounds attention scores, takes none.
        params = params | {"head": {"kernel": params["embedding"]["embedding"].T}}
        decoder = dataclasses.replace(decoder, tie_embeddings=False)
    # recjax.serve computes with norm scales in float32, as this process does; other servers round them.
    dtype = "float32"
    if api != "recjax":
        dtype = jnp.dtype(policy.decoder.dtype).name
    if path is not None:
        export_model(folder, decoder, params, model_folder(path), dtype)
        return
    with tempfile.TemporaryDirectory() as base:
        write_base(Path(base), decoder, policy.tokenizer, policy.stop_ids)
        export_model(folder, decoder, params, Path(base), dtype)
