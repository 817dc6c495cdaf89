"""Loads Hugging Face tokenizers, builds a character tokenizer, and converts text to token ids and back."""

import contextlib
import functools
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import tokenizers
import transformers
from tokenizers import decoders
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from recjax import HIDES_TORCH
from recjax.errors import UserError
from recjax.hub.chat_rendering import CHAT_DATE, turn_end

# Wherever torch is installed, transformers imports it for tokenizers and configs, which takes 3 to 17 s; recjax needs
# nothing of torch. In a command, and in a program that imports neither before `recjax.run`, transformers looks for
# torch here and finds none: None stands for a module that cannot be imported. Code of users can import torch all the
# same; USE_TORCH=1 is for agents and programs that run transformers' models.
_modules: dict[str, Any] = sys.modules
if HIDES_TORCH and os.environ.get("USE_TORCH") != "1" and _modules.setdefault("torch", None) is None:
    transformers.utils.is_torch_available.cache_clear()
    transformers.utils.is_torch_available()
    del sys.modules["torch"]

_CONTEXT = 32  # so many preceding tokens can change how tokens decode
_PARTS = 3  # an incomplete character has at most so many tokens
LONG_TEXT = 4096  # recjax tokenizes texts of more characters while other threads run
_CONFIG_BYTES = 2**18  # transformers takes minutes to check the lists of larger configs
_TEMPLATES = "additional_chat_templates"  # this folder in a model folder contains named chat templates
_BEFORE = ("\n", "a", "0", ".", "(")  # recjax encodes a text after these; few tokens span both
Tokens = Sequence[int] | np.ndarray
TOKENIZER_FILES = ("*.json", "*.jinja", "merges.txt", "tokenizer.model")


def model_folder(path: str | Path, patterns: Sequence[str] = TOKENIZER_FILES) -> Path:
    """The local folder of a model; downloads it from the Hugging Face hub if `path` is not a folder.

    Args:
        path: local folder, or hub name such as "HuggingFaceTB/SmolLM2-135M-Instruct".
        patterns: glob patterns of the files to download; ignored for a local folder.
    Raises:
        UserError: `path` is not a folder, and the hub cannot serve it; or a file of the folder is a link out of it.
    """
    if Path(path).is_dir():
        return checked_links(Path(path))
    try:
        return checked_links(Path(huggingface_hub.snapshot_download(str(path), allow_patterns=list(patterns))))
    except LinkError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(
            f"model {str(path)!r}",
            f"is no local folder, and the Hugging Face hub did not serve it ({str(error).splitlines()[0]})",
            "give a local folder with config.json, weights and tokenizer.json",
        ) from error


class LinkError(UserError):
    """A file of a model folder is a link to a file elsewhere."""


def checked_links(folder: Path) -> Path:
    """The model folder, after a check that its files are its own, since exports copy some of them.

    The Hugging Face cache may link files of `snapshots/REVISION` to `blobs` next to `snapshots`.

    Raises:
        LinkError: a file, or the folder of chat templates, is a link out of the model folder.
    """
    root = folder.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    for file in [*folder.iterdir(), *folder.glob(f"{_TEMPLATES}/*")]:
        if not file.is_file() and file.name != _TEMPLATES:
            continue
        target = file.resolve()
        if not any(target.is_relative_to(allowed_folder) for allowed_folder in allowed):
            raise LinkError(
                f"{file} is a link to {target}, outside of its folder; put the file itself there, or name the"
                " folder that has it"
            )
    return folder


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """The built-in tokenizer: `<eos>` (id 0) and one token per character; decoding returns exactly the encoded text.

    It pads with `<eos>`, because the policy could sample a separate padding token.

    Args:
        characters: alphabet, in the order of the ids (from 1).
    Raises:
        UserError: `characters` is empty or contains a character twice.
    """
    repeated = sorted({character for character in characters if characters.count(character) > 1})
    if repeated or not characters:
        raise UserError(f"characters {characters!r}", "must name each character once", f"repeated: {repeated}")
    vocabulary = {token: index for index, token in enumerate(["<eos>", *characters])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<eos>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def load_tokenizer(path: str | Path, chat_date: str | None = None) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model folder or hub name; decoding keeps all spaces.

    Args:
        chat_date: date (YYYY-MM-DD) for chat templates that read the clock; None: today. The tokenizer keeps this date
            for its lifetime.
    Raises:
        UserError: the folder or hub has no tokenizer, or it cannot be read.
    """
    folder = model_folder(path)
    # Without this check, transformers may build an empty tokenizer from config.json.
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError(folder, "holds no tokenizer", "put the model's tokenizer.json and tokenizer_config.json there")
    check_configs(folder)
    _check_readable(folder)
    # A folder may enable clean_up_tokenization_spaces, which makes decoding drop spaces before punctuation.
    options = {"trust_remote_code": False, "clean_up_tokenization_spaces": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:
        # The Rust tokenizers raise a bare Exception for a damaged file.
        raise UserError(
            problem=f"the tokenizer in {folder} cannot be read ({error})", remedy="fetch its files again"
        ) from error
    assert tokenizer is not None
    tokenizer.init_kwargs.pop(CHAT_DATE, None)  # a saved tokenizer may contain an old date
    if reads_clock(folder):
        tokenizer.init_kwargs[CHAT_DATE] = chat_date or date.today().isoformat()
    return tokenizer


def reads_clock(path: str | Path) -> bool:
    """True if a chat template of the folder or hub name writes the current date or time into prompts."""
    folder = model_folder(path)
    for pattern in ("*.jinja", f"{_TEMPLATES}/*.jinja", "chat_template.json", "tokenizer_config.json"):
        for file in folder.glob(pattern):
            if "strftime_now" in file.read_text(encoding="utf-8", errors="replace"):
                return True
    return False


def _check_readable(folder: Path) -> None:
    """Refuses a tokenizer.model if the package that reads it is missing; transformers may not name the package."""
    if any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        return
    with (folder / "tokenizer.model").open("rb") as file:
        is_tiktoken = re.fullmatch(rb"[A-Za-z0-9+/=]+ \d+\s*", file.readline(1000)) is not None
    package = "tiktoken" if is_tiktoken else "sentencepiece"
    if importlib.util.find_spec(package) is None:
        raise UserError(
            folder,
            f"holds its tokenizer only as tokenizer.model, and the package {package} that reads it is not installed",
            f"pip install {package}, or put the model's tokenizer.json there",
        )


def check_configs(folder: Path) -> None:
    """Refuses a model folder that needs its own Python code (`auto_map`), or has a config far larger than any model's.

    Raises:
        UserError: a file has `auto_map`, which the message quotes, or is too large.
    """
    for file in (folder / "config.json", folder / "generation_config.json"):
        if file.is_file() and file.stat().st_size > _CONFIG_BYTES:
            raise UserError(
                file,
                f"has {file.stat().st_size} bytes, and a model's has {_CONFIG_BYTES} at most",
                "fetch the file again, or remove long lists such as eos_token_id",
            )
    for file in sorted(folder.glob("*config*.json")):
        try:
            fields = json.loads(file.read_text(encoding="utf-8-sig"))
        except (ValueError, OSError, RecursionError):
            continue  # the code that needs this file reports the error
        if isinstance(fields, dict) and fields.get("auto_map"):
            raise UserError(
                file,
                f"auto_map = {fields['auto_map']!r:.200} asks for Python code of the model's own, which recjax"
                " never runs",
                "use a model of a supported family, and remove auto_map if its code is not needed",
            )


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), folder: str | Path | None = None
) -> tuple[int, ...]:
    """Token ids that end a completion: end-of-sequence ids, the end of an assistant's turn, and the stop strings.

    Args:
        tokenizer: tokenizer with an end-of-sequence id and a chat template that ends turns with a token, or either.
        stop: strings of one token each; only exactly this token stops, not a longer token with the same beginning.
        folder: model folder or hub name. Its generation_config.json (or, if missing, config.json) may list more
            end-of-sequence ids, which many chat models have. None reads no file.
    Raises:
        UserError: a stop string is not exactly one token, the file is damaged, or no stop id is known.
    """
    ids = []
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    if folder is not None:
        ids += listed_eos(model_folder(folder))
    end = turn_end(tokenizer)
    if end is not None:
        ids.append(end)
    for text in stop:
        tokens = encode_after(tokenizer, (), text, "stop string")
        # The second test refuses text that encodes to the unknown token.
        if len(tokens) != 1 or token_texts(tokenizer, tokens) != [text]:
            raise UserError(
                f"stop string {text!r}",
                f"must be exactly one token, but this tokenizer reads it as {tokenizer.convert_ids_to_tokens(tokens)}",
                "choose a single token",
            )
        ids += tokens
    if not ids:
        raise UserError(problem="the tokenizer has no end-of-sequence token", remedy="name at least one stop string")
    return tuple(dict.fromkeys(ids))


def listed_eos(folder: Path) -> list[int]:
    """The end-of-sequence ids in a model's files, read in the same order as in transformers.

    Raises:
        UserError: generation_config.json or config.json is damaged, or has other values than ids.
    """
    for file in (folder / "generation_config.json", folder / "config.json"):
        if not file.is_file():
            continue
        try:
            eos = json.loads(file.read_text(encoding="utf-8-sig")).get("eos_token_id")
        except (ValueError, AttributeError, RecursionError) as error:
            raise UserError(file, f"cannot be read ({error})", "correct it or fetch the file again") from error
        if eos is None:
            return []
        ids = eos if isinstance(eos, list) else [eos]
        if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
            raise UserError(f"{file}: eos_token_id", "takes a token id or a list of them", "correct it", value=eos)
        return ids
    return []


@functools.lru_cache(maxsize=2**18)
def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """The UTF-8 bytes that a token adds to a text; one character may need several tokens."""
    text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    if "\ufffd" not in text:
        if token in tokenizer.all_special_ids:
            return text.encode()
        # Decode the token twice, because some tokenizers drop the space before the first token.
        twice = str(tokenizer.decode([token, token], clean_up_tokenization_spaces=False))
        return twice[len(text) :].encode()
    name = str(tokenizer.convert_ids_to_tokens(token) or "")
    number = re.fullmatch("<0x([0-9A-Fa-f]{2})>", name)
    if number:
        return bytes.fromhex(number[1])
    byte_names = _byte_level_names()
    if not all(character in byte_names for character in name):
        return text.encode()
    return bytes(byte_names[character] for character in name)


@functools.cache
def _byte_level_names() -> dict[str, int]:
    """The bytes that the characters in names of byte-level tokens stand for.

    Most characters stand for the byte of their own code. The others, in their order, stand for the remaining bytes.
    """
    characters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    names = {character: ord(character) for character in characters if ord(character) < 256}
    remaining_bytes = sorted(set(range(256)) - set(names.values()))
    other_characters = [character for character in characters if character not in names]
    return names | dict(zip(other_characters, remaining_bytes, strict=True))


def _backend(tokenizer: PreTrainedTokenizerBase) -> tokenizers.Tokenizer | None:
    """The Rust tokenizer that transformers would call with the same result, but several times as slowly; or None."""
    fast_class = PreTrainedTokenizerFast
    kind = type(tokenizer)
    if not issubclass(kind, fast_class):
        return None
    for name in ("encode", "_encode_plus", "decode", "_decode"):
        if getattr(kind, name) is not getattr(fast_class, name):
            return None
    backend = tokenizer.backend_tokenizer
    if backend.truncation or backend.padding or backend.encode_special_tokens != tokenizer.split_special_tokens:
        return None
    return backend


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, text_name: str, special: bool = False) -> list[int]:
    """Token ids of a text, without added special tokens unless `special` is true."""
    backend = _backend(tokenizer)
    # The Rust tokenizer raises a bare Exception for unknown text if the vocabulary has no unknown token.
    with _explained(tokenizer, f"{text_name} {text[:200]!r}", "has text outside the tokenizer's vocabulary", text):
        if backend and len(text) > LONG_TEXT:  # `encode` holds Python's global lock, and `encode_batch` does not
            return backend.encode_batch([text], add_special_tokens=special)[0].ids
        encoded: Any = (backend or tokenizer).encode(text, add_special_tokens=special)
        return getattr(encoded, "ids", encoded)


def _unknown_characters(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Up to ten characters that the tokenizer cannot encode, in order of appearance."""
    unknown = []
    for character in dict.fromkeys(text):
        try:
            tokenizer.encode(character, add_special_tokens=False)
        except Exception:  # the Rust tokenizer raises a bare Exception
            unknown.append(character)
        if len(unknown) == 10:
            break
    return "".join(unknown)


@contextlib.contextmanager
def _explained(tokenizer: PreTrainedTokenizerBase, text_name: str, problem: str, text: str = "") -> Iterator[None]:
    """Replaces an error of the tokenizer by a UserError, also a panic, which is no `Exception` in Python.

    Args:
        text: text to encode, whose unknown characters the error names.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            problem = (
                f"makes the tokenizer in {tokenizer.name_or_path or 'memory'} fail ({error}), perhaps at a pattern in"
                " tokenizer.json that takes too many steps; remove this text, or use another model"
            )
        elif not isinstance(error, Exception):
            raise
        elif text:
            problem = f"{problem}: {_unknown_characters(tokenizer, text)!r}"
        raise UserError(problem=f"{text_name} {problem}") from error


@functools.lru_cache(maxsize=8)
def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Characters of the longest token's name, which has at least a character for each one that the token stands for."""
    return max(len(name) for name in tokenizer.get_vocab())


# --- Text that follows other text. SentencePiece tokenizers add a space before a text when they encode it, and remove
# one when they decode it. Both are right at the beginning of a text and wrong in the middle.


def decode_after(tokenizer: PreTrainedTokenizerBase, before: Tokens, tokens: Tokens) -> str:
    """The text that tokens add after the tokens `before`, including the text of special tokens.

    Args:
        before: all preceding tokens, such as a prompt; if empty or only the begin-of-sequence token, `tokens` start
            the text.
    """
    if _decodes_alone(tokenizer, before):
        return _decode(tokenizer, tokens)
    context = [int(token) for token in before[-_CONTEXT:]]
    head = _decode(tokenizer, context)
    if len(before) > _CONTEXT:
        # A context that starts in the middle of a character could make the following characters unreadable.
        for _ in range(_PARTS):
            if not head.startswith("\ufffd"):
                break
            context = context[1:]
            head = _decode(tokenizer, context)
    text = _decode(tokenizer, context + [int(token) for token in tokens])
    if text.startswith(head):
        return text[len(head) :]
    # The tokens complete a character at the end of the context.
    common = os.path.commonprefix([head, text])  # noqa: RUF071 – compares texts, not paths
    return text[len(common) :]


def _decodes_alone(tokenizer: PreTrainedTokenizerBase, before: Tokens) -> bool:
    """True if tokens decode to the same text after `before` as at the beginning of a text."""
    return _begins(tokenizer, before) or _changes_nothing(tokenizer, int(before[-1]))


def decode_each_after(
    tokenizer: PreTrainedTokenizerBase, before: Sequence[Tokens], tokens: Sequence[np.ndarray]
) -> list[str]:
    """The results of `decode_after` for many pairs, in one call of the Rust tokenizer where the tokenizer has one."""
    backend = _backend(tokenizer)
    alone: dict[int, list[int]] = {}  # the keys are the numbers of the pairs
    if backend is not None:
        for number, (earlier, ids) in enumerate(zip(before, tokens, strict=True)):
            if _decodes_alone(tokenizer, earlier):
                alone[number] = ids.tolist()
    texts: dict[int, str] = {}
    if alone:
        assert backend is not None
        with _explained(tokenizer, f"text of {sum(len(ids) for ids in alone.values())} tokens", "cannot be decoded"):
            decoded = backend.decode_batch(list(alone.values()), skip_special_tokens=False)
        texts = dict(zip(alone, decoded, strict=True))
    for number, (earlier, ids) in enumerate(zip(before, tokens, strict=True)):
        # `decode_after` also reads the complete characters before an incomplete one at the end.
        if number not in texts or texts[number].endswith("\ufffd"):
            texts[number] = decode_after(tokenizer, earlier, ids)
    return [texts[number] for number in range(len(tokens))]


def encode_after(tokenizer: PreTrainedTokenizerBase, before: Tokens, text: str, text_name: str = "text") -> list[int]:
    """Token ids of a text that follows other tokens, without added special tokens.

    Args:
        before: all preceding tokens; if empty, the text follows an unknown text.
        text_name: name of the text in error messages.
    Raises:
        UserError: the vocabulary does not cover the text.
    """
    ids = _encode(tokenizer, text, text_name)
    decoded = _decode(tokenizer, ids)
    keeps_first_space = decoded.startswith(" ") == text.startswith(" ")
    is_same_everywhere = _decode(tokenizer, ids * 2) == 2 * decoded and keeps_first_space
    if is_same_everywhere or (len(before) and _begins(tokenizer, before)):
        return ids
    earlier_texts = list(_BEFORE)
    last = tokenizer.added_tokens_decoder.get(int(before[-1])) if len(before) else None
    if last is not None:
        earlier_texts.insert(0, last.content)
    for earlier_text in earlier_texts:
        earlier_ids = _encode(tokenizer, earlier_text, text_name)
        joined_ids = _encode(tokenizer, earlier_text + text, text_name)
        is_known = len(earlier_ids) > 0 and tokenizer.unk_token_id not in earlier_ids
        is_split = joined_ids[: len(earlier_ids)] == earlier_ids and len(joined_ids) > len(earlier_ids)
        if is_known and is_split:
            return joined_ids[len(earlier_ids) :]
    return ids


def _begins(tokenizer: PreTrainedTokenizerBase, before: Tokens) -> bool:
    """True if the next token begins a text: `before` is empty or only the begin-of-sequence token."""
    return len(before) == 0 or (len(before) == 1 and int(before[0]) == tokenizer.bos_token_id)


@functools.lru_cache(maxsize=256)
def _changes_nothing(tokenizer: PreTrainedTokenizerBase, last: int) -> bool:
    """True if tokens decode to the same text after this token as at the beginning of a text."""
    if _reads_alike(tokenizer):
        return not _decode(tokenizer, [last]).endswith("\ufffd")
    # Some tokenizers add a space to the text after each added token.
    added = tokenizer.added_tokens_decoder.get(last)
    if added is None:
        return False
    plain_ids = tokenizer.encode("a", add_special_tokens=False)
    ids_after = tokenizer.encode(f"{added.content}a", add_special_tokens=False)
    return ids_after == [last, *plain_ids]


def _reads_alike(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if the kind of tokenizer decodes complete characters alike at the beginning and in the middle of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and isinstance(backend.decoder, decoders.ByteLevel | decoders.Fuse | None)


def token_texts(tokenizer: PreTrainedTokenizerBase, tokens: Tokens) -> list[str]:
    """The text of each token in the middle of a text; an incomplete character is U+FFFD."""
    texts = {token: _decode(tokenizer, [token]) for token in tokens}
    if not _reads_alike(tokenizer):
        for token, once in texts.items():
            twice = _decode(tokenizer, [token, token])
            if twice != 2 * once and "\ufffd" not in once and token not in tokenizer.all_special_ids:
                texts[token] = twice[len(once) :]
    return [texts[token] for token in tokens]


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: Tokens) -> str:
    ids = np.asarray(tokens, int).tolist()
    backend = _backend(tokenizer)
    decode: Callable[..., Any] = functools.partial(
        tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    if backend is not None:
        decode = functools.partial(backend.decode, skip_special_tokens=False)
    with _explained(tokenizer, f"text of {len(ids)} tokens", "cannot be decoded"):
        text = decode(ids)
        if not text.endswith("\ufffd"):
            return text
        # Some tokenizers decode none of several adjacent characters if the last one is incomplete.
        for count in range(1, _PARTS + 1):
            complete = decode(ids[:-count])
            if not complete.endswith("\ufffd"):
                return text if text.startswith(complete) else complete + "\ufffd" * count
    return text


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    first: int = 0,
    *,
    rendered: bool | Sequence[bool] = False,
    vocabulary: int | None = None,
) -> list[list[int]]:
    """Token ids of each prompt; plain text begins with the tokenizer's begin-of-sequence token if it uses one.

    A chat template writes all its special tokens itself, so a rendered chat gets no additional tokens, as in
    transformers' `apply_chat_template`. Plain text never gets a second begin-of-sequence token. No prompt gets an
    end-of-sequence token.

    Args:
        first: number of the first prompt in error messages, for prompts that are part of a longer list.
        rendered: True if a chat template wrote the prompts; or one such flag for each prompt.
        vocabulary: number of rows in the model's embedding; None checks no ids.
    Raises:
        UserError: a prompt has no tokens, characters outside the vocabulary, or a token without an embedding.
    """
    begin = [tokenizer.bos_token_id]
    prefix = begin if _encode(tokenizer, "", "", special=True)[:1] == begin else []
    are_rendered = [rendered] * len(prompts) if isinstance(rendered, bool) else rendered
    encoded = []
    for index, (prompt, is_rendered) in enumerate(zip(prompts, are_rendered, strict=True), first):
        ids = _encode(tokenizer, prompt, f"prompt {index},")
        if not is_rendered and ids[:1] != prefix:
            ids = prefix + ids
        if not ids:
            raise UserError(problem=f"prompt {index}, {prompt!r}, has no tokens", remedy="a prompt needs at least one")
        check_embedded(tokenizer, ids, vocabulary, f"prompt {index}, {prompt!r:.80}")
        encoded.append(ids)
    return encoded


def check_embedded(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int] | np.ndarray, vocabulary: int | None, source: str
) -> None:
    """Refuses tokens without an embedding: a tokenizer may have more tokens than the embedding has rows.

    Args:
        vocabulary: number of rows in the model's embedding; None skips the check.
        source: source of the tokens, for the error message.
    Raises:
        UserError: a token has no embedding; the message has the source, the token, the folder and both sizes.
    """
    if vocabulary is None or not len(ids):
        return
    highest = int(np.max(ids))
    if highest < vocabulary:
        return
    raise UserError(
        source,
        f"token {tokenizer.convert_ids_to_tokens(highest)!r} has id {highest}, but the model in"
        f" {tokenizer.name_or_path or 'memory'} has an embedding of {vocabulary} tokens and a tokenizer of"
        f" {len(tokenizer)}",
        "take the tokenizer that belongs to the weights, resize the embedding (transformers'"
        " resize_token_embeddings), or remove the token from the text",
    )
