"""Inputs of every system of a run: one model folder, one set of prompts, one batch to compare losses on."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from benchmarks.shapes import Shape, Sizes
from recjax.errors import UserError
from recjax.hub.export import export_model, write_base
from recjax.models.decoder import init_params
from recjax.models.decoder_config import DecoderConfig
from recjax.runtime.files import write_manifest

NEVER = "<never>"  # the end-of-sequence token: its id is the first that no model has


def write_inputs(folder: Path, shape: Shape, text: str, is_drawn: bool = False) -> None:
    """Writes model/, prompts.jsonl, batch.npz and inputs.json, all that a worker reads.

    Args:
        folder: empty.
        text: English, the source of a real model's prompts.
        is_drawn: write no random weights; each system draws its own on its device.
    Raises:
        ValueError: the model's folder is not there, or the text is too short.
    """
    random = np.random.default_rng(0)
    if isinstance(shape.model, Sizes):
        sizes = shape.model
        vocabulary, tokenizer = sizes.vocabulary, word_tokenizer(sizes.vocabulary)
        write_random_model(folder / "model", sizes, tokenizer, is_drawn)
        prompts = random.integers(1, vocabulary, (shape.prompts + 1, shape.prompt_tokens))
    else:
        tokenizer = _copied_model(folder / "model", Path(shape.model))
        vocabulary = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
        prompts = _cut(tokenizer, text, shape)
    # All tokens but the first, which pads.
    stops = random.permutation(np.arange(1, vocabulary))[: int(shape.stop_share * vocabulary)].tolist()
    stops = stops or [tokenizer.eos_token_id]
    generation = {"eos_token_id": stops, "pad_token_id": tokenizer.pad_token_id}
    (folder / "model" / "generation_config.json").write_text(json.dumps(generation))
    write_manifest(folder / "model")  # of the folder's current files

    # The row after the last prompt is for recjax, whose runs hold problems out.
    rows = [{"prompt": tokenizer.decode(row), "answer": "-"} for row in prompts]
    for name, part in [("prompts", rows[: shape.prompts]), ("held_out", rows[shape.prompts :])]:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    np.savez(
        folder / "batch.npz",
        prompts=prompts[: shape.prompts].astype(np.int32),
        completions=random.integers(1, vocabulary, (shape.rows, shape.completion_tokens)).astype(np.int32),
        rewards=random.random(shape.rows, np.float32),
        noise=random.normal(0.0, 0.1, (shape.rows, shape.completion_tokens)).astype(np.float32),
    )
    described = dataclasses.asdict(shape) | {"rows": shape.rows, "stop_ids": stops, "vocabulary": vocabulary}
    described |= {"is_drawn": is_drawn and isinstance(shape.model, Sizes)}
    (folder / "inputs.json").write_text(json.dumps(described, indent=2) + "\n")


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A word of four letters for each id, so that decoding and encoding give the same ids back; id 0 pads."""

    def word(number: int) -> str:
        return "".join(chr(ord("a") + number // 26**place % 26) for place in range(4))

    words = {word(number): number for number in range(vocabulary)} | {NEVER: vocabulary}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=word(0), eos_token=NEVER)


def write_random_model(folder: Path, sizes: Sizes, tokenizer: PreTrainedTokenizerBase, is_drawn: bool = False) -> None:
    """Writes a Hugging Face folder, of a tokenizer with a token more than the model has, which ends completions.

    Args:
        is_drawn: write no weights.
    """
    config = DecoderConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
    )
    base = folder if is_drawn else folder.parent / "base"
    base.mkdir()
    write_base(base, config, tokenizer, (sizes.vocabulary,))
    if not is_drawn:
        export_model(folder, config, init_params(config, jax.random.key(0)), base)


def _copied_model(folder: Path, source: Path) -> PreTrainedTokenizerBase:
    """A folder with copies of the weights of `source`, and its tokenizer.

    The end-of-sequence token is `NEVER`. A run refuses weights that are links to another folder.
    """
    if not (source / "config.json").is_file():
        raise UserError(
            "",
            f"{source} holds no config.json; `python -m experiments.smollm2 --output {source}` makes the model, or"
            " link its folder there",
        )
    folder.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"eos_token": NEVER, "pad_token": tokenizer.pad_token})
    tokenizer.bos_token = None  # some systems put it before every prompt, others do not
    tokenizer.save_pretrained(folder)
    for file in source.glob("*.safetensors*"):
        shutil.copy(file, folder)
    config = json.loads((source / "config.json").read_text()) | {"eos_token_id": tokenizer.eos_token_id}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return tokenizer


def _cut(tokenizer: PreTrainedTokenizerBase, text: str, shape: Shape) -> np.ndarray:
    """Stretches of the text that have `prompt_tokens` tokens, the same ones cut out as within the text."""
    ids, length = tokenizer.encode(text, add_special_tokens=False), shape.prompt_tokens
    stretches = [ids[start : start + length] for start in range(0, len(ids) - length, length)]
    kept = [part for part in stretches if tokenizer.encode(tokenizer.decode(part), add_special_tokens=False) == part]
    if len(kept) < shape.prompts + 1:
        raise UserError(
            "", f"the text gives {len(kept)} prompts of {length} tokens; the shape needs {shape.prompts + 1}"
        )
    return np.array(kept[: shape.prompts + 1])
