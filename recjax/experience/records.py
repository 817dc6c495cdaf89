"""Converts completions to records, and records to the columns of a store, to bytes and to JSON.

These conversions need no database, so that the queue can keep groups without one.
"""

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from recjax.errors import UserError
from recjax.experience.columns import COLUMNS, DTYPES, STORED, encode_json
from recjax.experience.group import Completion, Grade, Group, Row, Turn
from recjax.experience.recorded import recorded_from_bytes, recorded_to_bytes
from recjax.models.sampling import Sampling
from recjax.tasks.problems import problem_text

CHAT_TEMPLATE = "chat_template"  # This metadata key has the variables of the chat template.
PROMPT_LEFT_OUT = "(the prompt was not recorded)"  # This prompt stands for one that was not recorded.
_BYTE_KINDS = DTYPES.keys() | {"bytes"}
_BYTE_COLUMNS = tuple(name for name in STORED if COLUMNS[name].kind in _BYTE_KINDS)


class Record(NamedTuple):
    """A completion as a store keeps it.

    group: the prompt and only this completion; a completion without rows has only its text.
    time: time of sampling or import.
    tokenizer: name of the tokens' vocabulary, see `tokenize.tokenizer_name`; None without tokens.
    number: place in the store, from 1 in order of arrival; 0 before the store has the completion.
    others: by name, the reward and the comment of each grader except `store.GIVEN`; only for exports and imports.
    """

    group: Group
    time: datetime
    tokenizer: str | None = None
    number: int = 0
    others: Mapping[str, tuple[Grade, str | None]] = {}

    @property
    def completion(self) -> Completion:
        """The record's only completion."""
        return self.group.completions[0]


def to_json(value: Any) -> str | None:
    """The text of JSON data; None for None and empty values."""
    return encode_json(value) if value else None


def from_json(text: str | None, default: Any) -> Any:
    """The JSON data of a text from `to_json`; the default for None."""
    return json.loads(text) if text else default


def row_of(record: Record, number: int, shared: dict | None = None) -> dict[str, Any]:
    """The columns of a completion, in the order of `columns.STORED`.

    Args:
        shared: columns of earlier completions in the same call, which are the same for equal objects; the objects must
            live as long as this dictionary.
    """
    if shared is None:
        shared = {}
    group = record.group
    completion = record.completion
    rows = completion.rows
    problem_key, prompt_text, messages = _once(shared, _problem_columns, group.prompt, group.answer)
    prompt_content, prompt_key, largest_token = _once(shared, _prompt_columns, group.prompt_tokens)
    temperature, top_k, top_p, min_p = _once(shared, _sampling_columns, completion.sampling)

    # The length of each row's own prompt; None if the row has its group's prompt.
    own_lengths: list[int | None] = []
    own_prompts = []
    for row in rows:
        prompt = row.prompt_tokens
        if prompt is group.prompt_tokens or np.array_equal(prompt, group.prompt_tokens):
            own_lengths.append(None)
        else:
            own_lengths.append(len(prompt))
            own_prompts.append(np.asarray(prompt, "<i4"))
    tokens = [np.asarray(row.tokens, "<i4") for row in rows]
    for array in own_prompts + tokens:
        if len(array):
            largest_token = max(largest_token, array.max().item())

    group_length = len(group.prompt_tokens)
    lengths = [len(array) for array in tokens]
    prompt_lengths = [len(row.prompt_tokens) for row in rows]
    row_lengths = [prompt + completion for prompt, completion in zip(prompt_lengths, lengths, strict=True)]
    has_several_prompts_or_rows = len(rows) > 1 or len(own_prompts) > 0
    stored_lengths = None
    if has_several_prompts_or_rows:
        stored_lengths = to_json([group_length, *zip(own_lengths, lengths, strict=True)])
        # The rows' own prompts follow the group's.
        prompt_content += _joined(own_prompts, "<i4")

    mask = _joined([row.mask for row in rows], "bool")
    has_logprobs = len(rows) > 0 and all(row.behavior_logprobs is not None for row in rows)
    logprobs = None
    if has_logprobs:
        logprobs = _joined([row.behavior_logprobs for row in rows], "<f4")
    policy_version = completion.policy_version
    if policy_version is not None:
        policy_version = int(policy_version)
    return {
        "number": number,
        "id": completion.id,
        "group_id": group.id,
        "source": completion.source,
        "tokenizer": record.tokenizer if rows or group_length else None,
        "prompt_key": prompt_key,
        "problem_key": problem_key,
        "prompt_length": max(prompt_lengths, default=group_length),
        "completion_length": sum(lengths),
        "row_length": max(row_lengths, default=0),
        "largest_token": largest_token,
        "is_plain": len(rows) == 1 and not has_several_prompts_or_rows and b"\0" not in mask,
        "has_logprobs": has_logprobs,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "truncated": bool(completion.truncated),
        "policy_version": policy_version,
        "time": _once(shared, datetime.timestamp, record.time),
        "prompt": prompt_text,
        "messages": messages,
        "completion": completion.text,
        "answer": group.answer,
        "metadata": to_json(completion.metadata),
        "token_versions": to_json(completion.version_runs),
        "turns": to_json(completion.turns),
        "row_lengths": stored_lengths,
        "prompt_tokens": prompt_content,
        "completion_tokens": _joined(tokens, "<i4"),
        "completion_mask": mask,
        "behavior_logprobs": logprobs,
        "recorded": recorded_to_bytes([row.recorded for row in rows]),
    }


def _once(shared: dict, columns_of: Callable[..., Any], *objects: Any) -> Any:
    """Calls a function once for the same objects; later calls return the first result."""
    key = (columns_of, *map(id, objects))
    if key not in shared:
        shared[key] = columns_of(*objects)
    return shared[key]


def _problem_columns(prompt: Any, answer: str | None) -> tuple[int, str | None, str | None]:
    """The columns problem_key, prompt and messages."""
    key = signed_hash(problem_text(prompt, answer).encode())
    if isinstance(prompt, str):
        return key, prompt, None
    return key, None, to_json(list(prompt))


def _prompt_columns(tokens: np.ndarray) -> tuple[bytes, int, int]:
    """The columns prompt_tokens and prompt_key, and the largest token, or 0 for an empty prompt."""
    content = np.asarray(tokens, "<i4").tobytes()
    return content, signed_hash(content), int(np.max(tokens, initial=0))


def _sampling_columns(sampling: Sampling | None) -> tuple[float | None, int | None, float | None, float | None]:
    """The columns temperature, top_k, top_p and min_p."""
    if sampling is None:
        return None, None, None, None
    return float(sampling.temperature), int(sampling.top_k), float(sampling.top_p), float(sampling.min_p)


def _joined(arrays: Sequence[Any], dtype: str) -> bytes:
    return b"".join([np.asarray(array, dtype).tobytes() for array in arrays])


def signed_hash(content: bytes) -> int:
    """A 64-bit checksum of bytes as a signed number."""
    return xxhash.xxh3_64_intdigest(content) - 2**63


def record_of(row: Mapping[str, Any], grade: Grade | None, comment: str | None = None) -> Record:
    """Converts the columns from `row_of` back to a completion, with its grade and the comment about it.

    Raises:
        ValueError: the columns contradict each other.
        UserError: the recorded arrays cannot be read.
    """
    prompts = np.frombuffer(row["prompt_tokens"], "<i4")
    tokens = np.frombuffer(row["completion_tokens"], "<i4")
    mask = np.frombuffer(row["completion_mask"], bool)
    logprobs = None
    if row["behavior_logprobs"] is not None:
        logprobs = np.frombuffer(row["behavior_logprobs"], "<f4")
    # Without row_lengths, there is at most one row, and it has the group's prompt.
    group_length = len(prompts)
    lengths: list[tuple[int | None, int]] = []
    if len(tokens):
        lengths.append((None, len(tokens)))
    if row["row_lengths"]:
        group_length, *lengths = json.loads(row["row_lengths"])
    _check_lengths(prompts, tokens, mask, logprobs, group_length=group_length, lengths=lengths)

    recorded = recorded_from_bytes(row["recorded"], [length for _, length in lengths])
    group_prompt = prompts[:group_length]
    rows = []
    prompt_start = group_length
    start = 0
    for (own_length, length), row_recorded in zip(lengths, recorded, strict=True):
        prompt = group_prompt
        if own_length is not None:
            prompt_end = prompt_start + own_length
            prompt = prompts[prompt_start:prompt_end]
            prompt_start = prompt_end
        end = start + length
        row_logprobs = None
        if logprobs is not None:
            row_logprobs = logprobs[start:end]
        rows.append(Row(prompt, tokens[start:end], mask[start:end], row_logprobs, row_recorded))
        start = end

    sampling = None
    if None not in (row["temperature"], row["top_k"], row["top_p"], row["min_p"]):
        sampling = Sampling(row["temperature"], row["top_k"], row["top_p"], row["min_p"])
    metadata = from_json(row["metadata"], {})
    if comment is not None:
        metadata = metadata | {"comment": comment}
    completion = Completion(
        id=row["id"],
        source=row["source"],
        text=row["completion"],
        rows=tuple(rows),
        sampling=sampling,
        policy_version=row["policy_version"],
        truncated=row["truncated"],
        grade=grade,
        version_runs=tuple(map(tuple, from_json(row["token_versions"], ()))),
        turns=tuple(Turn(*turn) for turn in from_json(row["turns"], ())),
        metadata=metadata,
    )
    prompt_or_chat = row["prompt"]
    if row["messages"] is not None:
        prompt_or_chat = json.loads(row["messages"])
    group = Group(row["group_id"], group_prompt, (completion,), prompt_or_chat, row["answer"])
    return Record(group, datetime.fromtimestamp(row["time"], UTC), row["tokenizer"], row["number"])


def _check_lengths(
    prompts: np.ndarray,
    tokens: np.ndarray,
    mask: np.ndarray,
    logprobs: np.ndarray | None,
    *,
    group_length: int,
    lengths: Sequence[tuple[int | None, int]],
) -> None:
    """Checks that columns have equal numbers of tokens.

    Args:
        group_length: length of the group's prompt.
        lengths: for each row, the length of its own prompt, or None, and of its tokens.
    """
    logprob_count = len(tokens)
    if logprobs is not None:
        logprob_count = len(logprobs)
    row_tokens = 0
    prompt_tokens = group_length
    for own_length, length in lengths:
        row_tokens += length
        if own_length is not None:
            prompt_tokens += own_length
    counts = [len(tokens), len(mask), logprob_count, row_tokens]
    if len(set(counts)) > 1 or len(prompts) != prompt_tokens:
        listed = ", ".join(map(str, counts))
        raise ValueError(
            "columns completion_tokens, completion_mask, behavior_logprobs and row_lengths: have different lengths,"
            f" {listed}"
        )


def record_to_plain(record: Record) -> dict[str, Any]:
    """Converts a completion to JSON data, without its grade; `record_from_plain` is the inverse."""
    plain = row_of(record, 0)
    for name in _BYTE_COLUMNS:
        if plain[name] is not None:
            plain[name] = base64.b64encode(plain[name]).decode()
    return plain


def record_from_plain(plain: Mapping[str, Any]) -> Record:
    """Converts the JSON data of `record_to_plain` back to a completion."""
    row = dict(plain)
    for name in _BYTE_COLUMNS:
        if row[name] is not None:
            row[name] = base64.b64decode(row[name])
    return record_of(row, None)


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
        are_known = len(prompt) > 0 and len(other_prompt) > 0
        if are_known and not np.array_equal(prompt, other_prompt):
            raise UserError(
                f"group {group.id!r}",
                f"rows {group.completions[0].id!r} and {record.completion.id!r} have different prompts, and all"
                " completions in a group must answer the same prompt",
                "import the rows as separate groups",
            )
        groups[group.id] = group._replace(completions=(*group.completions, record.completion))
    return list(groups.values())


def records_of(groups: Iterable[Group], tokenizer: str | None, time: datetime) -> list[Record]:
    """Converts the completions of groups to records, in order.

    Args:
        tokenizer: name of the tokens' vocabulary.
        time: time to record.
    """
    records = []
    for group in groups:
        for completion in group.completions:
            records.append(Record(group._replace(completions=(completion,)), time, tokenizer))
    return records


def groups_to_bytes(groups: Sequence[Group]) -> bytes:
    """Converts groups to bytes, with the columns of a store; `groups_from_bytes` is the inverse."""
    if not groups:
        return b""
    rows = []
    time = datetime.fromtimestamp(0, UTC)
    shared: dict = {}
    for number, group in enumerate(groups):
        for record in records_of([group], "", time):
            row = row_of(record, number, shared)
            row["grade"] = to_json(record.completion.grade)
            rows.append(row)
    file = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), file, compression="zstd")
    return file.getvalue().to_pybytes()


def groups_from_bytes(content: bytes) -> list[Group]:
    """Converts the bytes of `groups_to_bytes` back to groups.

    Raises:
        UserError: the bytes have another format.
    """
    if not content:
        return []
    groups: dict[int, Group] = {}
    for row in pq.read_table(pa.BufferReader(content)).to_pylist():
        values = from_json(row.pop("grade"), None)
        grade = None
        if values is not None:
            grade = Grade.from_json(values)
        record = record_of(row, grade)
        group = groups.setdefault(record.number, record.group._replace(completions=()))
        groups[record.number] = group._replace(completions=(*group.completions, record.completion))
    return list(groups.values())
