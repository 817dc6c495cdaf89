"""A store as a table that other programs read: Parquet or JSON Lines, with a row for each row of a completion.

docs/store_format.md describes the columns. Each row of a completion with several has its id in the column `trajectory`.
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recjax.experience.group import Completion, Grade, Group, Row, Turn, recorded_from_text, recorded_to_text
from recjax.experience.store import Record, Store
from recjax.files import read_sealed, size_and_digest, whole_file
from recjax.models.sampling import Sampling

_VERSION, _VERSIONS = (
    b"recjax.experience.version",
    (b"4", b"5", b"6", b"7"),
)  # metadata key of Parquet files, and its values
TOGETHER = 1024  # completions to convert or import at a time
_RUNS, _TURNS = "token_versions", "turns"  # metadata keys for `Completion.version_runs` and `Completion.turns`
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
_PART = pa.struct([("name", pa.string()), ("value", pa.float64())])
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("group_id", pa.string()),
        ("source", pa.string()),
        ("prompt", pa.string()),
        ("messages", pa.list_(_MESSAGE)),
        ("completion", pa.string()),
        ("answer", pa.string()),
        ("tokenizer", pa.string()),
        ("prompt_tokens", pa.list_(pa.int32())),
        ("completion_tokens", pa.list_(pa.int32())),
        ("completion_mask", pa.list_(pa.bool_())),
        ("behavior_logprobs", pa.list_(pa.float32())),
        ("reward", pa.float64()),
        ("reward_parts", pa.list_(_PART)),
        ("accurate", pa.bool_()),
        ("truncated", pa.bool_()),
        ("policy_version", pa.int32()),
        ("temperature", pa.float64()),
        ("top_k", pa.int32()),
        ("top_p", pa.float64()),
        ("min_p", pa.float64()),
        ("time", pa.timestamp("us", tz="UTC")),
        ("trajectory", pa.string()),
        ("metadata", pa.string()),
        ("group_prompt_tokens", pa.list_(pa.int32())),
        ("other_rewards", pa.string()),
        ("turn_rewards", pa.list_(pa.float64())),
        ("recorded", pa.string()),
    ],
    metadata={_VERSION: _VERSIONS[-1]},
)
# Columns and their first versions.
_NEW = {"group_prompt_tokens": b"5", "other_rewards": b"5", "turn_rewards": b"6", "recorded": b"7"}


def export_store(store: Store, path: Path) -> int:
    """Writes all completions of a store to a .parquet or .jsonl file; returns their number.

    Raises:
        ValueError: another ending, a damaged store, or a file that cannot be written; an existing file stays.
    """
    records, count = store.records(others=True), 0
    if path.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"--output {str(path)!r}: give a file that ends with .parquet or .jsonl")
    with whole_file(path) as file:
        writer = pq.ParquetWriter(file, SCHEMA, compression="zstd") if path.suffix == ".parquet" else None
        while part := list(itertools.islice(records, TOGETHER)):
            rows = [row for record in part for row in _rows_of(record)]
            count += len(part)
            if writer:
                writer.write_table(pa.Table.from_pylist(rows, SCHEMA))
            else:
                for row in rows:
                    plain = {key: one.tolist() if isinstance(one, np.ndarray) else one for key, one in row.items()}
                    line = json.dumps(plain | {"time": row["time"].isoformat()}, ensure_ascii=False)
                    file.write(f"{line}\n".encode())
        if writer:
            writer.close()
    return count


def read_exported(path: Path) -> Iterator[Record] | None:
    """The completions of an exported file, or of a folder of Parquet parts, read on demand; None for other files.

    Raises:
        ValueError: a file that is damaged or cannot be read; the message names file, row and column.
    """
    if path.is_dir():
        return _records(row for part in _parts(path) for row in _exported_rows(part))
    if path.suffix == ".parquet" and path.is_file():
        try:
            is_ours = _VERSION in (pq.read_schema(path).metadata or {})
        except (pa.ArrowException, OSError):
            return None
        return _records(_exported_rows(path)) if is_ours else None
    if path.suffix == ".jsonl" and path.is_file():
        with path.open(encoding="utf-8") as file:
            try:
                first = json.loads(file.readline())
            except ValueError:
                return None
        is_ours = isinstance(first, dict) and first.keys() | {"recorded"} == set(SCHEMA.names)
        return _records(_exported_rows(path)) if is_ours else None
    return None


def _parts(folder: Path) -> list[Path]:
    """The parts of a store of an earlier recjax, after a comparison with their checksums."""
    parts, manifest = sorted(folder.glob("part-*.parquet")), folder / ".manifest.json"
    states = read_sealed(manifest) if manifest.exists() else {}
    for name, known in states.items():
        part = folder / name
        if (size_and_digest(part) if part.exists() else None) not in known:
            raise ValueError(
                f"{part} is damaged or missing; restore it from a backup, or delete {manifest} to import the files as"
                " they are"
            )
    if not parts:
        raise ValueError(f"{folder} has no part-*.parquet; give files, or the folder of a store of an earlier recjax")
    return parts


def _exported_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                place = f"{path}: line {number}"
                try:
                    row = json.loads(line)
                    yield place, dict.fromkeys(_NEW) | row | {"time": datetime.fromisoformat(row["time"])}
                except (ValueError, TypeError, KeyError) as error:
                    raise ValueError(
                        f"{place}: is not a line of an export ({error!r}); export the store again"
                    ) from error
        return
    try:
        file = pq.ParquetFile(path)
        found = (file.schema_arrow.metadata or {}).get(_VERSION)
        if found not in _VERSIONS:
            version = "no store version" if found is None else f"store version {found.decode()!r}"
            raise ValueError(f"{path}: has {version}, and this recjax imports 4 to 7; export it with its own recjax")
        types = dict(zip(file.schema_arrow.names, file.schema_arrow.types, strict=True))
        for field in SCHEMA:
            if field.name not in types and found >= _NEW.get(field.name, b""):
                raise ValueError(f"{path}: column {field.name} is missing; export the store again")
            if types.get(field.name, field.type) != field.type:
                kind = types[field.name]
                raise ValueError(f"{path}: column {field.name} has type {kind}; convert it to {field.type}")
        number = 0
        for batch in file.iter_batches(TOGETHER):
            for row in batch.to_pylist():
                yield f"{path}: row {number}", dict.fromkeys(_NEW) | row
                number += 1
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}); restore the file from a backup, or move it away") from error


def _rows_of(record: Record) -> list[dict[str, Any]]:
    group, one = record.group, record.completion
    grade = one.grade or Grade(None)
    is_chat, metadata = not isinstance(group.prompt, str), dict(one.metadata)
    metadata |= {_RUNS: one.version_runs} if one.version_runs else {}
    metadata |= {_TURNS: one.turns} if one.turns else {}
    others = {name: [*given, comment] for name, (given, comment) in record.others.items()}
    prompts = [group.prompt_tokens, *(row.prompt_tokens for row in one.rows)]
    has_own_prompts = not all(np.array_equal(prompts[0], tokens) for tokens in prompts)
    common = {
        "id": one.id,
        "group_id": group.id,
        "source": one.source,
        "prompt": None if is_chat else group.prompt,
        "messages": list(group.prompt) if is_chat else None,
        "completion": one.text,
        "answer": group.answer,
        "tokenizer": record.tokenizer,
        "prompt_tokens": group.prompt_tokens if len(group.prompt_tokens) else None,
        "completion_tokens": None,
        "completion_mask": None,
        "behavior_logprobs": None,
        "reward": grade.reward,
        "reward_parts": grade.reward_parts
        and [{"name": name, "value": value} for name, value in grade.reward_parts.items()],
        "accurate": grade.accurate,
        "truncated": one.truncated,
        "policy_version": one.policy_version,
        **dict(zip(Sampling._fields, one.sampling or (None,) * len(Sampling._fields), strict=True)),
        "time": record.time,
        "trajectory": one.id if len(one.rows) > 1 or has_own_prompts else None,
        "metadata": json.dumps(metadata) if metadata else None,
        "group_prompt_tokens": group.prompt_tokens if has_own_prompts else None,
        "other_rewards": json.dumps(others) if others else None,
        "turn_rewards": grade.turns or None,
        "recorded": None,
    }
    return [
        common
        | {
            "id": f"{one.id}+{place}" if place else one.id,
            "prompt_tokens": row.prompt_tokens if len(row.prompt_tokens) else None,
            "completion_tokens": row.tokens,
            "completion_mask": row.mask,
            "behavior_logprobs": row.behavior_logprobs,
            "recorded": recorded_to_text([row.recorded]),
        }
        for place, row in enumerate(one.rows)
    ] or [common]


def _records(rows: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[Record]:
    prompts: dict[str, np.ndarray] = {}
    for name, members in itertools.groupby(rows, lambda member: member[1]["trajectory"] or member[1]["id"]):
        (place, first), *others = members
        if first["id"] != name:
            raise ValueError(
                f"{place}: row {first['id']!r}: the first row of its trajectory {name!r} is not before it; restore the"
                " first row, or remove all rows of the trajectory"
            )
        try:
            record = _record_of([first, *(row for _, row in others)], prompts)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"{place}: {error}") from error
        yield record


def _record_of(rows: Sequence[Mapping[str, Any]], prompts: dict[str, np.ndarray]) -> Record:
    row = rows[0]
    if (row["prompt"] is None) == (row["messages"] is None):
        raise ValueError(f"column prompt: {row['prompt']!r:.80}: give one of prompt and messages")
    metadata = json.loads(row["metadata"]) if row["metadata"] else {}
    if not isinstance(metadata, dict):
        raise ValueError(f"column metadata: {row['metadata']!r:.80}: takes the text of a JSON object, or null")
    prompt_tokens = _array(row["group_prompt_tokens"] or row["prompt_tokens"], np.int32)
    if row["trajectory"] and row["group_prompt_tokens"] is None:  # version 4: the prompt of the group's first row
        prompt_tokens = prompts.setdefault(row["group_id"], prompt_tokens)
    made = tuple(
        Row(
            _array(each["prompt_tokens"], np.int32),
            _array(each["completion_tokens"], np.int32),
            each["completion_mask"] and _array(each["completion_mask"], bool),
            None if each["behavior_logprobs"] is None else _array(each["behavior_logprobs"], np.float32),
            *recorded_from_text(each["recorded"]),
        )
        for each in rows
        if each["completion_tokens"] is not None
    )
    # Versions and turns in another format are metadata of the user.
    runs, found = metadata.get(_RUNS), metadata.get(_TURNS)
    turns = tuple(Turn(*turn[:2]) for turn in found) if _are_turns(found, made) else ()
    are_runs = (
        isinstance(runs, list)
        and all(isinstance(run, list) and len(run) == 2 and all(type(number) is int for number in run) for run in runs)
        and all(each.mask is not None for each in made)
        and sum(count for _, count in runs) == sum(int(np.sum(each.mask)) for each in made)
    )
    for key, is_ours in ((_RUNS, are_runs), (_TURNS, turns)):
        if is_ours:
            del metadata[key]
    sampling = [row[name] for name in Sampling._fields]
    sampling[-1] = sampling[-1] or 0.0  # a missing min_p counts as 0
    parts = row["reward_parts"] and {pair["name"]: pair["value"] for pair in row["reward_parts"]}
    rewards = row["turn_rewards"] or [reward for turn in found[: len(turns)] for reward in turn[2:]] if turns else ()
    grade = Grade(row["reward"], parts, row["accurate"], turns=tuple(map(float, rewards)))
    completion = Completion(
        id=row["id"],
        source=row["source"],
        text=row["completion"],
        rows=made,
        sampling=None if None in sampling else Sampling(*sampling),
        policy_version=row["policy_version"],
        truncated=row["truncated"],
        grade=None if row["reward"] is None and not parts else grade,
        version_runs=tuple(map(tuple, runs)) if are_runs else (),
        turns=turns,
        metadata=metadata,
    )
    prompt = row["messages"] if row["prompt"] is None else row["prompt"]
    others = json.loads(row["other_rewards"] or "{}")
    others = {name: (Grade.from_json(given), comment) for name, (*given, comment) in others.items()}
    time = row["time"] if row["time"] is None or row["time"].tzinfo else row["time"].replace(tzinfo=UTC)
    group = Group(row["group_id"], prompt_tokens, (completion,), prompt, row["answer"])
    return Record(group, time, row["tokenizer"], others=others)


def _array(values: Sequence | None, dtype: type) -> np.ndarray:
    if values is not None and None in values:
        raise ValueError(f"{values!r:.80}: has a null")
    return np.array([] if values is None else values, dtype)


def _are_turns(turns: Any, rows: Sequence[Row]) -> bool:
    """True if a value has the format of turns: row, end and, in version 4, reward of each."""
    return isinstance(turns, list) and all(
        isinstance(turn, list)
        and len(turn) in (2, 3)
        and all(type(number) is int for number in turn[:2])
        and all(type(reward) in (int, float) and math.isfinite(reward) for reward in turn[2:])
        and 0 <= turn[0] < len(rows)
        and 0 < turn[1] <= len(rows[turn[0]].tokens)
        for turn in turns
    )
