"""Low-rank adapters as the files that PEFT reads."""

import json
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

from recjax.hub.weights import TENSOR_NAMES
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
        name = TENSOR_NAMES[f"layers/{target}/kernel"]
        modules.append(name.split(".")[-2])
        for side, letter in (("a", "A"), ("b", "B")):
            for layer, kernel in enumerate(leaves[f"layers/{target}_lora_{side}/kernel"]):
                place = name.format(layer=layer).removesuffix("weight")
                tensors[f"base_model.model.{place}lora_{letter}.weight"] = np.ascontiguousarray(kernel.T)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
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
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
