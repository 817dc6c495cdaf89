"""Completions as records, and as the columns of a store, of bytes and of JSON.

These conversions need no database, so that the queue can keep groups without one.
"""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from recjax.experience.group import Completion, Grade, Group, Row, Turn, recorded_from_bytes, recorded_to_bytes
from recjax.models.sampling import Sampling
from recjax.tasks.problems import problem_text

CHAT_TEMPLATE = "chat_template"  # metadata key for the variables of the chat template
PROMPT_LEFT_OUT = "(the prompt was not recorded)"  # prompt of completions whose prompt was not recorded
_BYTES = ("prompt_tokens", "completion_tokens", "completion_mask", "behavior_logprobs", "recorded")


class Record(NamedTuple):
    """A completion as a store keeps it.

    group: the prompt and only this completion; a completion without rows has only its text.
    time: time of sampling or import.
    tokenizer: name of the tokens' vocabulary, see `tokenize.tokenizer_name`; None without tokens.
    number: place in the store, from 1 in order of arrival; 0 before the store has the completion.
    others: rewards of other graders than `store.GIVEN`, each with its comment; only for exports and imports.
    """

    group: Group
    time: datetime
    tokenizer: str | None = None
    number: int = 0
    others: Mapping[str, tuple[Grade, str | None]] = {}

    @property
    def completion(self) -> Completion:
        """The completion."""
        return self.group.completions[0]


_encode = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps would make an encoder for every value


def to_json(value: Any) -> str | None:
    """The text of JSON data; None for None and empty values."""
    return _encode(value) if value else None


def from_json(text: str | None, default: Any) -> Any:
    """The JSON data of a text from `to_json`; the default for None."""
    return json.loads(text) if text else default


def row_of(record: Record, number: int) -> dict[str, Any]:
    """The columns of a completion, in order, without `checksum`."""
    group = record.group
    completion = record.completion
    rows = completion.rows
    sampling = completion.sampling
    prompt = np.asarray(group.prompt_tokens, "<i4")
    is_chat = not isinstance(group.prompt, str)
    own_prompts = [None if np.array_equal(row.prompt_tokens, prompt) else row.prompt_tokens for row in rows]
    prompts = [prompt, *(tokens for tokens in own_prompts if tokens is not None)]
    is_single = len(rows) <= 1 and len(prompts) == 1
    tokens = [row.tokens for row in rows]
    prompt_lengths = [len(row.prompt_tokens) for row in rows]
    lengths = [*map(len, tokens)]
    own_lengths = [None if values is None else len(values) for values in own_prompts]
    has_logprobs = bool(rows) and all(row.behavior_logprobs is not None for row in rows)
    return {
        "number": number,
        "id": completion.id,
        "group_id": group.id,
        "source": completion.source,
        "tokenizer": record.tokenizer if rows or len(prompt) else None,
        "prompt_key": signed_hash(prompt.tobytes()),
        "problem_key": signed_hash(problem_text(group.prompt, group.answer).encode()),
        "prompt_length": max(prompt_lengths, default=len(prompt)),
        "completion_length": sum(lengths),
        "row_length": max(map(sum, zip(prompt_lengths, lengths, strict=True)), default=0),
        "largest_token": max([int(np.max(values)) for values in (*prompts, *tokens) if len(values)], default=0),
        "is_plain": is_single and len(rows) == 1 and bool(rows[0].mask.all()),
        "has_logprobs": has_logprobs,
        "temperature": sampling and float(sampling.temperature),
        "top_k": sampling and int(sampling.top_k),
        "top_p": sampling and float(sampling.top_p),
        "min_p": sampling and float(sampling.min_p),
        "truncated": bool(completion.truncated),
        "policy_version": None if completion.policy_version is None else int(completion.policy_version),
        "time": record.time.timestamp(),
        "prompt": None if is_chat else group.prompt,
        "messages": to_json(list(group.prompt)) if is_chat else None,
        "completion": completion.text,
        "answer": group.answer,
        "metadata": to_json(completion.metadata),
        "token_versions": to_json(completion.version_runs),
        "turns": to_json(completion.turns),
        "row_lengths": None if is_single else to_json([len(prompt), *zip(own_lengths, lengths, strict=True)]),
        "prompt_tokens": _joined(prompts, "<i4"),
        "completion_tokens": _joined(tokens, "<i4"),
        "completion_mask": _joined([row.mask for row in rows], "bool"),
        "behavior_logprobs": _joined([row.behavior_logprobs for row in rows], "<f4") if has_logprobs else None,
        "recorded": recorded_to_bytes(rows),
    }


def _joined(arrays: Sequence[Any], dtype: str) -> bytes:
    return b"".join([np.asarray(array, dtype).tobytes() for array in arrays])


def signed_hash(content: bytes) -> int:
    """A 64-bit checksum as a signed number."""
    return xxhash.xxh3_64_intdigest(content) - 2**63


def record_of(row: Mapping[str, Any], grade: Grade | None, comment: str | None = None) -> Record:
    """The completion of the columns from `row_of`, with its grade and the comment about it.

    Raises:
        ValueError: the columns contradict each other.
    """
    prompts = np.frombuffer(row["prompt_tokens"], "<i4")
    tokens = np.frombuffer(row["completion_tokens"], "<i4")
    mask = np.frombuffer(row["completion_mask"], bool)
    logprobs = row["behavior_logprobs"]
    logprobs = None if logprobs is None else np.frombuffer(logprobs, "<f4")
    plain = [len(prompts), *([[None, len(tokens)]] if len(tokens) else [])]
    size, *lengths = from_json(row["row_lengths"], plain)
    counts = len(tokens), len(mask), len(tokens if logprobs is None else logprobs), sum(length for _, length in lengths)
    if len(set(counts)) > 1 or len(prompts) != size + sum(own_length or 0 for own_length, _ in lengths):
        lengths_of = "completion_tokens, completion_mask, behavior_logprobs and row_lengths"
        raise ValueError(f"columns {lengths_of}: have different lengths, {', '.join(map(str, counts))}")
    recorded = recorded_from_bytes(row["recorded"], [length for _, length in lengths])
    prompt = prompts[:size]
    rows = []
    begin = size
    start = 0
    for (own_length, length), of_sampler in zip(lengths, recorded, strict=True):
        here = slice(start, start + length)
        end = begin + (own_length or 0)
        of_row = prompt if own_length is None else prompts[begin:end]
        rows.append(Row(of_row, tokens[here], mask[here], None if logprobs is None else logprobs[here], of_sampler))
        begin = end
        start = start + length
    sampling = (row["temperature"], row["top_k"], row["top_p"], row["min_p"])
    metadata = from_json(row["metadata"], {})
    completion = Completion(
        id=row["id"],
        source=row["source"],
        text=row["completion"],
        rows=tuple(rows),
        sampling=None if None in sampling else Sampling(*sampling),
        policy_version=row["policy_version"],
        truncated=row["truncated"],
        grade=grade,
        version_runs=tuple(map(tuple, from_json(row["token_versions"], ()))),
        turns=tuple([Turn(*turn) for turn in from_json(row["turns"], ())]),
        metadata=metadata if comment is None else metadata | {"comment": comment},
    )
    chat_or_text = row["prompt"] if row["messages"] is None else json.loads(row["messages"])
    group = Group(row["group_id"], prompt, (completion,), chat_or_text, row["answer"])
    return Record(group, datetime.fromtimestamp(row["time"], UTC), row["tokenizer"], row["number"])


def record_to_plain(record: Record) -> dict[str, Any]:
    """Converts a completion to JSON data, without its grade; `record_from_plain` is the inverse."""
    columns = row_of(record, 0).items()
    return {name: base64.b64encode(value).decode() if isinstance(value, bytes) else value for name, value in columns}


def record_from_plain(plain: Mapping[str, Any]) -> Record:
    """Converts the JSON data of `record_to_plain` back to a completion."""
    columns = {name: base64.b64decode(plain[name]) for name in _BYTES if plain[name] is not None}
    return record_of({**plain, **columns}, None)


def groups_of(records: Iterable[Record]) -> list[Group]:
    """Joins the completions of each group, in order of the groups' first completions.

    Raises:
        ValueError: completions of a group have different prompts.
    """
    groups: dict[str, Group] = {}
    for record in records:
        group = groups.get(record.group.id)
        if group is None:
            groups[record.group.id] = record.group
            continue
        prompt = group.prompt_tokens
        other_prompt = record.group.prompt_tokens
        if len(prompt) and len(other_prompt) and (len(prompt) != len(other_prompt) or (prompt != other_prompt).any()):
            raise ValueError(
                f"group {group.id!r}: rows {group.completions[0].id!r} and {record.completion.id!r} have different"
                " prompts, and all completions in a group must answer the same prompt; import the rows as separate"
                " groups"
            )
        groups[group.id] = group._replace(completions=(*group.completions, record.completion))
    return list(groups.values())


def records_of(groups: Iterable[Group], tokenizer: str | None, time: datetime) -> list[Record]:
    """The completions of groups as records, in order.

    Args:
        tokenizer: name of the tokens' vocabulary.
        time: time to record.
    """
    return [
        Record(group._replace(completions=(completion,)), time, tokenizer)
        for group in groups
        for completion in group.completions
    ]


def groups_to_bytes(groups: Sequence[Group]) -> bytes:
    """Converts groups to bytes, with the columns of a store; `groups_from_bytes` is the inverse."""
    rows = []
    for number, group in enumerate(groups):
        for record in records_of([group], "", datetime.fromtimestamp(0, UTC)):
            rows.append(row_of(record, number) | {"grade": to_json(record.completion.grade)})
    file = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), file, compression="zstd")
    return file.getvalue().to_pybytes() if groups else b""


def groups_from_bytes(content: bytes) -> list[Group]:
    """Converts the bytes of `groups_to_bytes` back to groups.

    Raises:
        ValueError: the bytes have another format.
    """
    groups: dict[int, Group] = {}
    for row in pq.read_table(pa.BufferReader(content)).to_pylist() if content else ():
        grade = json.loads(row.pop("grade") or "null")
        record = record_of(row, grade and Grade.from_json(grade))
        group = groups.setdefault(record.number, record.group._replace(completions=()))
        groups[record.number] = group._replace(completions=(*group.completions, record.completion))
    return list(groups.values())
