"""Hostile model folders: each is refused with its name and a reason, at once, and runs nothing.

`python -m tests.faults.model_folders` prints what was tried, what was as it should be, and what was not.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from recjax.hub.chat_rendering import render_chats
from recjax.hub.export import export_model, write_base
from recjax.hub.tokenizers import character_tokenizer, encode_prompts, load_tokenizer
from recjax.hub.weights import load_pretrained
from recjax.models.decoder_config import DecoderConfig
from tests.tiny import params_of

SECONDS = 20.0
CHAT = [{"role": "user", "content": "12"}]
CODE = "import pathlib; pathlib.Path(__file__).with_name('RAN').touch()\nclass X: pass\n"


def make_model(folder):
    """A tiny model folder that is as it should be."""
    config = DecoderConfig(14, 16, 32, 2, 2, 1, 8)
    base = folder / "base"
    base.mkdir()
    write_base(base, config, character_tokenizer("0123456789+="), 1)
    export_model(folder / "good", config, params_of(config), base)
    return folder / "good"


def _config(**fields):
    def change(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def _rope(**fields):
    return _config(rope_theta=fields.get("rope_theta", 1e4), rope_parameters={"rope_type": "default", **fields})


def _file(name, content):
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def _code(name):
    def change(folder):
        (folder / "code.py").write_text(CODE)
        file = folder / name
        fields = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(fields | {"auto_map": {"AutoTokenizer": ["code.X", None], "AutoConfig": "code.X"}}))

    return change


def _tensors(change):
    def apply(folder):
        file = folder / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return apply


def _value(value):
    def change(tensors):
        name = sorted(tensors)[len(tensors) // 2]
        tensors[name] = tensors[name].copy()
        tensors[name].flat[-1] = value

    return _tensors(change)


def _shards(name):
    def change(folder):
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))

    return change


def _link(name, weights=True):
    def change(folder):
        outside = folder.parent / "outside.safetensors"
        (folder / "model.safetensors").rename(outside)
        (folder / name).symlink_to(outside)
        if name != "model.safetensors":
            (folder / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": dict.fromkeys(load_file(outside), name)})
            )

    return change


def _pattern(text):
    def change(folder):
        file = folder / "tokenizer.json"
        split = {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"pre_tokenizer": split}))

    return change


def _template(text):
    return _file("chat_template.jinja", text)


TURNS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATES = {
    "loops": TURNS,
    "long text": "{{ 'x' * 10**9 }}",
    "longer text": "{{ 'x' * 10**12 }}",
    "doubling": "{% set n = namespace(s='x') %}{% for a in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "wide format": "{{ '{:>999999999}'.format(1) }}",
    "wide centre": "{{ 'x'|center(999999999) }}",
    "many turns": "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "large power": "{{ 9 ** (9 ** 9) }}",
    "escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "escape by attribute": "{{ (''|attr('__class__')) ~ cycler.__init__.__globals__.os.system('touch RAN') }}",
    "include": "{% include '/etc/passwd' %}",
    "syntax": "{% for %}",
    "undefined": "{{ nothing.at.all }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "division": "{{ 1 / 0 }}",
}

BIG = 10**6
FOLDERS = {
    "a million layers": _config(num_hidden_layers=BIG),
    "layers beyond the weights": _config(num_hidden_layers=3),
    "fewer layers": _config(num_hidden_layers=1),
    **{f"{key} = {value!r}": _config(**{key: value}) for key in ("hidden_size", "vocab_size", "num_hidden_layers",
       "num_attention_heads", "num_key_value_heads", "head_dim") for value in (-1, 0, 2**40, "8", 1.5)},
    "rope_theta 0": _rope(rope_theta=0),
    "rope_theta negative": _rope(rope_theta=-1e4),
    "rope_theta infinite": _rope(rope_theta=float("inf")),
    "rope_theta NaN": _rope(rope_theta=float("nan")),
    "rope factor 0": _rope(rope_theta=1e4, rope_type="linear", factor=0),
    "norm epsilon 0": _config(rms_norm_eps=0),
    "norm epsilon NaN": _config(rms_norm_eps=float("nan")),
    "other family": _config(model_type="gpt2"),
    "no family": _config(model_type=None),
    "unknown field": _config(secret_maths=True),
    "code in config": _code("config.json"),
    "code in tokenizer": _code("tokenizer_config.json"),
    "code in generation": _code("generation_config.json"),
    "code in preprocessor": _code("preprocessor_config.json"),
    "config is a list": _file("config.json", "[]"),
    "config is empty": _file("config.json", ""),
    "config is cut": _file("config.json", '{"model_type": "llama", '),
    "config is deep": _file("config.json", "[" * 100_000),
    "config is bytes": _file("config.json", b"\xff\xfe"),
    "config of a million ends": _config(eos_token_id=[*range(BIG)]),
    "pattern of endless steps": _pattern("(a+)+$"),
    "NaN weight": _value(np.nan),
    "infinite weight": _value(np.inf),
    "negative infinite weight": _value(-np.inf),
    "missing tensor": _tensors(lambda tensors: tensors.pop(sorted(tensors)[0])),
    "other shape": _tensors(lambda tensors: tensors.update({sorted(tensors)[0]: np.zeros((2, 2), np.float32)})),
    "whole numbers": _tensors(lambda tensors: tensors.update({sorted(tensors)[0]: np.zeros((14, 16), np.int32)})),
    "extra tensor": _tensors(lambda tensors: tensors.update(other=np.zeros(3, np.float32))),
    "empty weights": _file("model.safetensors", b""),
    "header bomb": _file("model.safetensors", (2**62).to_bytes(8, "little") + b"{}"),
    "header is deep": _file("model.safetensors", (100_000).to_bytes(8, "little") + b"[" * 100_000),
    "a pickle": lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
    "shard above": _shards("../outside.safetensors"),
    "shard absolute": _shards("/etc/passwd"),
    "shard absolute weights": _shards("/tmp/outside.safetensors"),
    "shard in a folder": _shards("sub/outside.safetensors"),
    "shard is a number": _shards(5),
    "shard is null": _shards(None),
    "shard is missing": _shards("model-00001.safetensors"),
    "shard link": _link("model-00001.safetensors"),
    "weights link": _link("model.safetensors"),
    "index is a list": lambda folder: (_shards("x")(folder), _file("model.safetensors.index.json", "[]")(folder)),
    "tokenizer is empty": _file("tokenizer.json", ""),
    "tokenizer is a list": _file("tokenizer.json", "[]"),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    **{f"template: {name}": _template(text) for name, text in TEMPLATES.items()},
}  # fmt: skip
HARMLESS = {"template: undefined", "code in preprocessor"}  # renders as nothing; refused or never read


def outcome(folder, name):
    """What is wrong with how a folder is refused: nothing, or a line."""
    started = time.monotonic()
    try:
        tokenizer = load_tokenizer(folder)
        if name.startswith("pattern"):
            encode_prompts(tokenizer, ["a" * 24 + "b"])
        load_pretrained(folder)
        if name.startswith("template"):
            render_chats(tokenizer, [CHAT], seconds=3.0)
        wrong = [] if name in HARMLESS else ["was loaded"]
    except ValueError as error:
        wrong = [] if len(str(error)) < 3_000 else [f"a long message: {str(error)[:200]}"]
        wrong += [] if str(folder) in str(error) else [f"does not name the folder: {str(error)[:200]}"]
    except Exception as error:  # what must not be
        wrong = [f"{type(error).__name__}: {str(error)[:200]}"]
    if (seconds := time.monotonic() - started) > SECONDS:
        wrong.append(f"took {seconds:.0f} s")
    if list(folder.rglob("RAN")) or Path("RAN").exists():
        wrong.append("ran code")
    return wrong


def campaign():
    """(number tried, what was wrong by name)."""
    wrong = {}
    with tempfile.TemporaryDirectory() as scratch, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # a question on standard input is answered by its end
        good = make_model(Path(scratch))
        load_pretrained(good)
        for number, (name, change) in enumerate(FOLDERS.items()):
            folder = Path(scratch) / f"case{number}" / "model"
            shutil.copytree(good, folder)
            change(folder)
            if found := outcome(folder, name):
                wrong[name] = found
    return len(FOLDERS), wrong


if __name__ == "__main__":
    count, bad = campaign()
    print(f"model folders: tried {count}, as it should be {count - len(bad)}, not {len(bad)}")
    for key, reasons in bad.items():
        print(f"  {key}: {'; '.join(reasons)}")
    sys.exit(bool(bad))
