"""Low-rank adapters as the files that PEFT reads."""

from pathlib import Path

import jax
import numpy as np

from recjax.hub.export import write_json, write_tensors
from recjax.hub.weights import MODULES
from recjax.models.decoder import DecoderConfig
from recjax.models.trainable import flatten


def write_adapters(folder: Path, config: DecoderConfig, params: dict, base: str) -> None:
    """adapter_config.json and adapter_model.safetensors, which `peft.PeftModel.from_pretrained(base, folder)` loads.

    Args:
        folder: is there.
        config: with `lora`.
        params: adapters, with or without the parameters beside them.
        base: folder or hub name of the model that the adapters belong to.
    """
    leaves = {path: np.asarray(jax.device_get(leaf)) for path, leaf in flatten(params).items()}
    tensors, modules = {}, []
    for target in config.lora.targets:
        module = MODULES[f"layers/{target}"]
        modules.append(module.split(".")[-1])
        for side, letter in (("a", "A"), ("b", "B")):
            for layer, kernel in enumerate(leaves[f"layers/{target}_lora_{side}/kernel"]):
                name = f"base_model.model.{module.format(layer=layer)}.lora_{letter}.weight"
                tensors[name] = np.ascontiguousarray(kernel.T)
    write_tensors(folder / "adapter_model.safetensors", tensors)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "target_modules": modules,
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_json(folder / "adapter_config.json", settings)
