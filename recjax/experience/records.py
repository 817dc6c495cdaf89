"""Completions as records, and as the columns of a store, of bytes and of JSON.

These conversions need no database, so that the queue can keep groups without one.
"""

import base64
import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from recjax.errors import UserError
from recjax.experience.completion_schema import COLUMNS, DTYPES, STORED, encode_json
from recjax.experience.group import Completion, Grade, Group, Row, Turn, recorded_from_bytes, recorded_to_bytes
from recjax.models.sampling import Sampling
from recjax.tasks.problems import problem_text

CHAT_TEMPLATE = "chat_template"  # metadata key for the variables of the chat template
PROMPT_LEFT_OUT = "(the prompt was not recorded)"  # prompt of completions whose prompt was not recorded
_BYTES = tuple(name for name in STORED if COLUMNS[name].kind in (*DTYPES, "bytes"))


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


def to_json(value: Any) -> str | None:
    """The text of JSON data; None for None and empty values."""
    return encode_json(value) if value else None


def from_json(text: str | None, default: Any) -> Any:
    """The JSON data of a text from `to_json`; the default for None."""
    return json.loads(text) if text else default


def row_of(record: Record, number: int, shared: dict | None = None) -> dict[str, Any]:
    """The columns of a completion, in the order of `completion_schema.STORED`.

    Args:
        shared: columns of earlier completions in the same call, which are the same for equal objects; the objects must
            live as long as this dictionary.
    """
    shared = {} if shared is None else shared
    group = record.group
    completion = record.completion
    rows = completion.rows
    problem_key, prompt_text, messages = _once(shared, _problem_columns, group.prompt, group.answer)
    prompt, prompt_key, largest = _once(shared, _prompt_columns, group.prompt_tokens)
    temperature, top_k, top_p, min_p = _once(shared, _sampling_columns, completion.sampling)
    own_prompts = [
        None
        if row.prompt_tokens is group.prompt_tokens or np.array_equal(row.prompt_tokens, group.prompt_tokens)
        # A row with its own prompt has it behind the group's.
        else np.asarray(row.prompt_tokens, "<i4")
        for row in rows
    ]
    size = len(group.prompt_tokens)
    prompt_lengths = [len(row.prompt_tokens) for row in rows]
    tokens = [np.asarray(row.tokens, "<i4") for row in rows]
    lengths = [len(values) for values in tokens]
    own_lengths = [None if values is None else len(values) for values in own_prompts]
    is_single = len(rows) <= 1 and own_lengths.count(None) == len(rows)
    others = [values for values in (*own_prompts, *tokens) if values is not None and len(values)]
    has_logprobs = bool(rows) and all(row.behavior_logprobs is not None for row in rows)
    mask = _joined([row.mask for row in rows], "bool")
    return {
        "number": number,
        "id": completion.id,
        "group_id": group.id,
        "source": completion.source,
        "tokenizer": record.tokenizer if rows or size else None,
        "prompt_key": prompt_key,
        "problem_key": problem_key,
        "prompt_length": max(prompt_lengths, default=size),
        "completion_length": sum(lengths),
        "row_length": max(map(operator.add, prompt_lengths, lengths), default=0),
        "largest_token": max([largest, *(values.max().item() for values in others)]),
        "is_plain": is_single and len(rows) == 1 and b"\0" not in mask,
        "has_logprobs": has_logprobs,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "truncated": bool(completion.truncated),
        "policy_version": None if completion.policy_version is None else int(completion.policy_version),
        "time": _once(shared, datetime.timestamp, record.time),
        "prompt": prompt_text,
        "messages": messages,
        "completion": completion.text,
        "answer": group.answer,
        "metadata": to_json(completion.metadata),
        "token_versions": to_json(completion.version_runs),
        "turns": to_json(completion.turns),
        "row_lengths": None if is_single else to_json([size, *zip(own_lengths, lengths, strict=True)]),
        "prompt_tokens": prompt
        if is_single
        else prompt + _joined([own for own in own_prompts if own is not None], "<i4"),
        "completion_tokens": _joined(tokens, "<i4"),
        "completion_mask": mask,
        "behavior_logprobs": _joined([row.behavior_logprobs for row in rows], "<f4") if has_logprobs else None,
        "recorded": recorded_to_bytes(rows) if any(row.recorded for row in rows) else None,
    }


def _once(shared: dict, columns_of: Callable[..., Any], *objects: Any) -> Any:
    """The result of a function, which is called once for the same objects."""
    key = columns_of, *map(id, objects)
    if key not in shared:
        shared[key] = columns_of(*objects)
    return shared[key]


def _problem_columns(prompt: Any, answer: str | None) -> tuple[int, str | None, str | None]:
    """The columns problem_key, prompt and messages."""
    key = signed_hash(problem_text(prompt, answer).encode())
    return (key, prompt, None) if isinstance(prompt, str) else (key, None, to_json(list(prompt)))


def _prompt_columns(tokens: np.ndarray) -> tuple[bytes, int, int]:
    """The columns prompt_tokens and prompt_key, and the largest token or 0."""
    content = np.asarray(tokens, "<i4").tobytes()
    return content, signed_hash(content), int(np.max(tokens, initial=0))


def _sampling_columns(sampling: Sampling | None) -> tuple[float | None, int | None, float | None, float | None]:
    """The columns of a distribution."""
    if sampling is None:
        return (None,) * 4
    return float(sampling.temperature), int(sampling.top_k), float(sampling.top_p), float(sampling.min_p)


def _joined(arrays: Sequence[Any], dtype: str) -> bytes:
    return b"".join([np.asarray(array, dtype).tobytes() for array in arrays])


def signed_hash(content: bytes) -> int:
    """A 64-bit checksum as a signed number."""
    return xxhash.xxh3_64_intdigest(content) - 2**63


def record_of(row: Mapping[str, Any], grade: Grade | None, comment: str | None = None) -> Record:
    """The completion of the columns from `row_of`, with its grade and the comment about it.

    Raises:
        UserError: the columns contradict each other.
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
        UserError: completions of a group have different prompts.
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
            raise UserError(
                f"group {group.id!r}",
                f"rows {group.completions[0].id!r} and {record.completion.id!r} have different prompts, and all"
                " completions in a group must answer the same prompt",
                "import the rows as separate groups",
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
    time = datetime.fromtimestamp(0, UTC)
    shared: dict = {}
    for number, group in enumerate(groups):
        for record in records_of([group], "", time):
            rows.append(row_of(record, number, shared) | {"grade": to_json(record.completion.grade)})
    file = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), file, compression="zstd")
    return file.getvalue().to_pybytes() if groups else b""


def groups_from_bytes(content: bytes) -> list[Group]:
    """Converts the bytes of `groups_to_bytes` back to groups.

    Raises:
        UserError: the bytes have another format.
    """
    groups: dict[int, Group] = {}
    for row in pq.read_table(pa.BufferReader(content)).to_pylist() if content else ():
        grade = json.loads(row.pop("grade") or "null")
        record = record_of(row, grade and Grade.from_json(grade))
        group = groups.setdefault(record.number, record.group._replace(completions=()))
        groups[record.number] = group._replace(completions=(*group.completions, record.completion))
    return list(groups.values())
