"""Imports completions from other programs into an experience store.

    python -m recjax.import_experience --input FILE [--input FILE ...] --output STORE [--source NAME] [column flags]

Files are JSON Lines, CSV or Parquet, or exports of recjax.export_experience. STORE is a file, or the URL of a database.
A row has a prompt (text or a list of messages) and a completion, or OpenAI-style messages in which the last one, from
the assistant, is the completion. The reward may be missing (pending). Optional columns are answer, reward_parts,
truncated or finish_reason, prompt_tokens, tokens and logprobs. Rows with equal prompts are a group unless
--group_column names another column. Before it writes anything, the command refuses malformed rows, with their place,
and files that the store already has.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import flags

from recjax.errors import UserError
from recjax.experience.records import Record
from recjax.models.sampling import Sampling
from recjax.runtime.console import command, start
from recjax.runtime.memory import disable_collector
from recjax.store.exchange import TOGETHER, read_exported
from recjax.store.foreign import Columns, Imported, import_rows
from recjax.store.store import Change, Store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FLAGS = flags.FLAGS
logger = logging.getLogger("recjax.import_experience")  # __name__ is "__main__" in a command


def import_files(
    files: Sequence[str | Path],
    place: str | Path,
    columns: Columns,
    source: str | None = None,
    tokenizer: str | None = None,
    sampling: Sampling | None = None,
) -> Imported:
    """Appends the completions of files to a store: all, or none if one is invalid.

    Args:
        place: file or URL of the store.
        columns, source, sampling: arguments of `foreign.import_rows`.
        tokenizer: folder or hub name of the tokenizer that made the token columns.
    Raises:
        UserError: a file or row is invalid, the store already has the rows, or `tokenizer` has no use.
    """
    vocabulary = None
    name = None
    if tokenizer:
        # Not at module level: these imports take seconds.
        from recjax.hub.tokenizers import load_tokenizer
        from recjax.store.tokenize import tokenizer_name

        vocabulary = load_tokenizer(tokenizer)
        name = tokenizer_name(vocabulary)
    imported = import_rows(files, columns, datetime.now(UTC), source=source, tokenizer=name, sampling=sampling)
    if vocabulary:
        if all(record.tokenizer is None for record in imported.records):
            raise UserError(f"--tokenizer {tokenizer!r}", "has no effect, as no row has tokens", "remove it")
        size = len(vocabulary)
        for record, where in zip(imported.records, imported.places, strict=True):
            token_arrays = [record.group.prompt_tokens]
            token_arrays += [row.tokens for row in record.completion.rows]
            if any((tokens >= size).any() for tokens in token_arrays):
                raise UserError(where, f"a token id is {size} or more, beyond the vocabulary of {tokenizer}")
        check_texts(imported.records, vocabulary, imported.places.__getitem__)
    with Store(place, create=True) as store:
        store.change(_changes(imported.records), are_checked=True)
    return imported


def import_exports(exports: Sequence[Iterable[Record]], place: str | Path) -> int:
    """Appends exported completions to a store: all, or none if one is invalid; returns their number.

    Args:
        exports: results of `exchange.read_exported`.
        place: file or URL of the store.
    Raises:
        UserError: a completion is invalid, or the store already has it.
    """
    with Store(place, create=True) as store:
        return store.change(_changes(itertools.chain.from_iterable(exports)), are_checked=True)


def _changes(records: Iterable[Record]) -> Iterator[Change]:
    """Changes that each append up to TOGETHER records."""
    remaining = iter(records)
    while True:
        batch = list(itertools.islice(remaining, TOGETHER))
        if not batch:
            return
        yield Change(batch)


def check_texts(records: Sequence[Record], tokenizer: "PreTrainedTokenizerBase", place: Callable[[int], str]) -> None:
    """Refuses rows whose tokens do not decode to their text; ignores whitespace and special tokens.

    Prompt tokens must decode to the prompt's text, or to a text with every message's content in order.

    Raises:
        UserError: tokens and text differ; the message has the place and the decoded text.
    """
    special = [token for token in tokenizer.all_special_tokens if token]

    def plain(text: str) -> str:
        for token in special:
            text = text.replace(token, "")
        return "".join(text.split())

    def has_in_order(decoded: str, parts: Sequence[str]) -> bool:
        start = 0
        for part in parts:
            text = plain(part)
            position = decoded.find(text, start)
            if position < 0:
                return False
            start = position + len(text)
        return True

    def check(column: str, tokens: np.ndarray, prompt_or_text: str | Sequence[Mapping[str, Any]], number: int) -> None:
        if not len(tokens):
            return
        decoded = tokenizer.decode(tokens)
        if isinstance(prompt_or_text, str):
            shown = prompt_or_text
            agrees = plain(str(decoded)) == plain(prompt_or_text)
        else:
            parts = [turn["content"] for turn in prompt_or_text]
            shown = " … ".join(parts)
            agrees = has_in_order(plain(str(decoded)), parts)
        if not agrees:
            raise UserError(
                place(number),
                f"{column} decode to {decoded!r:.120}, but the text is {shown!r:.120}",
                "give the tokens of this text, or remove the tokens",
            )

    for number, record in enumerate(records):
        check("prompt_tokens", record.group.prompt_tokens, record.group.prompt, number)
        for row in record.completion.rows:
            check("tokens", row.tokens, record.completion.text, number)


@command
def main(argv: list[str]) -> None:
    """Imports the files and prints a summary."""
    if argv[1:]:
        raise UserError(f"{argv[1]!r}", "unknown argument", "give every file as --input FILE")
    names: dict[str, Any] = {field: FLAGS[f"{field}_column"].value for field in Columns._fields}
    sampling = None
    if FLAGS.temperature is not None:
        sampling = Sampling(FLAGS.temperature, FLAGS.top_k, FLAGS.top_p, FLAGS.min_p)
    elif (FLAGS.top_k, FLAGS.top_p, FLAGS.min_p) != (0, 1.0, 0.0):
        raise UserError(
            "--top_k, --top_p and --min_p", "need --temperature", "give --temperature, or remove the others"
        )
    exports = [read_exported(Path(file)) for file in FLAGS.input]
    imported = None
    groups = Counter()
    pending = 0
    exported = [export for export in exports if export is not None]
    if len(exported) == len(exports):
        count = import_exports(exported, FLAGS.output)
        summary = "completions"
    elif exported:
        raise UserError("--input", "import exported files and files of other programs one after the other")
    else:
        imported = import_files(
            FLAGS.input,
            FLAGS.output,
            Columns(**names),
            source=FLAGS.source,
            tokenizer=FLAGS.tokenizer,
            sampling=sampling,
        )
        groups = Counter(record.group.id for record in imported.records)
        count = len(imported.records)
        pending = sum(record.completion.grade is None for record in imported.records)
        summary = f"rows in {len(groups)} groups, {pending} rows pending"
    with Store(FLAGS.output) as store:
        total = store.last().completions
        in_all = f"; the store has {total} rows" if total > count else ""
        print(f"{store.name}: {count} {summary}{in_all}")
    if imported is None:
        return
    single = sum(size == 1 for size in groups.values())
    if single:
        logger.warning(
            "%d of %d groups have a single completion, from which most advantages cannot learn. Rows with equal prompts"
            " form a group, or rows with equal --group_column; see algorithm.advantage={name: raw_reward}",
            single,
            len(groups),
        )
    if imported.unused:
        remedy = "; --reward_column names the column of rewards" if pending == count else ""
        print(f"unused columns: {', '.join(imported.unused)}{remedy}")


if __name__ == "__main__":
    flags.DEFINE_multi_string(
        "input",
        None,
        "File to import: .csv, .parquet, .jsonl, .ndjson, .json, .gz of the last three, or a store's folder.",
        required=True,
    )
    flags.DEFINE_string("output", None, "File or URL of the store; created if it does not exist.", required=True)
    flags.DEFINE_string("source", None, "Source of the rows; default: each file's name without its ending.")
    for field, default in Columns._field_defaults.items():
        flags.DEFINE_string(f"{field}_column", default, f"Name of the column with the {field}.")
    flags.DEFINE_string("tokenizer", None, "Folder or hub name of the model whose tokenizer made the token columns.")
    flags.DEFINE_float("temperature", None, "Temperature that sampled the completions.", lower_bound=0)
    flags.DEFINE_integer("top_k", 0, "top_k that sampled the completions; 0: all tokens.", lower_bound=0)
    flags.DEFINE_float("top_p", 1.0, "top_p that sampled the completions; 1: all tokens.", lower_bound=0, upper_bound=1)
    flags.DEFINE_float("min_p", 0.0, "min_p that sampled the completions; 0: all tokens.", lower_bound=0, upper_bound=1)
    disable_collector()
    start(main)
