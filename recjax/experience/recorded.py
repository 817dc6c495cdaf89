"""Arrays that a sampler recorded for each token: joins them, and converts them to lists and bytes.

A token's set has the ids that the sampling distribution kept, see `recjax.models.logprobs.kept_tokens`.
"""

import io
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from recjax.errors import UserError
from recjax.models.sampling import KEPT, TOP_IDS, TOP_LOGPROBS

LOWEST_LOGPROB = -9000.0  # in nats; servers write -9999 for a log-prob of minus infinity
# Limit for each token: a bit for each token of a vocabulary of a million, or 32,768 numbers.
RECORDED_BYTES = 2**17


def missing_value(dtype: np.dtype) -> float:
    """The value of recorded arrays at tokens without a record: -1, or NaN for floats; 0 for unsigned integers."""
    kind = np.dtype(dtype).kind
    if kind == "f":
        return np.nan
    if kind == "i":
        return -1
    return 0


def join_recorded(parts: Iterable[tuple[Mapping[str, np.ndarray], int]]) -> dict[str, np.ndarray]:
    """Joins the recorded arrays of token sequences end to end, padded to the largest shape of a token.

    Args:
        parts: recorded arrays and number of tokens of each sequence.
    """
    parts = list(parts)
    tokens = sum(count for _, count in parts)
    arrays_by_name: dict[str, list[np.ndarray]] = {}
    for recorded, _ in parts:
        for name, values in recorded.items():
            arrays_by_name.setdefault(name, []).append(values)
    joined = {}
    for name, arrays in arrays_by_name.items():
        dtype = arrays[0].dtype
        # Turns may have recorded sets of different sizes, and text between turns has no record.
        token_shape = np.max([values.shape[1:] for values in arrays], axis=0).astype(int)
        shape = (tokens, *token_shape)
        joined[name] = np.full(shape, missing_value(dtype), dtype)
        start = 0
        for recorded, count in parts:
            if name in recorded:
                values = recorded[name]
                filled = [slice(start, start + count)]
                filled += [slice(size) for size in values.shape[1:]]
                joined[name][tuple(filled)] = values
            start += count
    return joined


# --- Sets of kept tokens.


def has_sets(
    recorded: Mapping[str, np.ndarray], mask: Bool[np.ndarray, "*rows time"]
) -> Bool[np.ndarray, "*rows time"]:
    """True for the tokens in `mask` with a recorded set."""
    has_set = np.zeros_like(mask)
    for name, values in recorded.items():
        if name in KEPT:
            # A set contains at least the token itself, so a token without any entry has no set.
            has_set |= (values > missing_value(values.dtype)).any(-1)
    return mask & has_set


def sets_to_lists(recorded: Mapping[str, np.ndarray]) -> list[list[int]] | None:
    """The recorded set of each token as ids in order, empty for a token without a set; None without recorded sets."""
    lists = None
    if "kept_ids" in recorded:
        lists = [sorted(ids[ids >= 0].tolist()) for ids in recorded["kept_ids"]]
    if "kept_bits" in recorded:
        is_kept = np.unpackbits(recorded["kept_bits"], axis=-1)
        bit_lists = [np.flatnonzero(bits).tolist() for bits in is_kept]
        if lists is None:
            lists = bit_lists
        else:
            # Each token has its set in one of the two forms.
            lists = [ids or bit_ids for ids, bit_ids in zip(lists, bit_lists, strict=True)]
    return lists


def sets_from_lists(lists: Any, tokens: Sequence[int], limit: int) -> dict[str, np.ndarray]:
    """Converts the sets of a server's reply to recorded arrays; empty if a set lacks its token, or none has ids.

    Args:
        lists: decoded JSON of any form; a token with an empty list has no set.
        limit: size of the largest set to keep; a token with a larger set has none.
    """
    if not limit or not isinstance(lists, list) or len(lists) != len(tokens):
        return {}
    for token, ids in zip(tokens, lists, strict=True):
        if not isinstance(ids, list):
            return {}
        # `type` and not isinstance, as JSON's true would pass for 1; ids must fit int32.
        if not all(type(kept) is int and 0 <= kept < 2**31 for kept in ids):
            return {}
        if ids and token not in ids:
            return {}
    if not any(lists):
        return {}
    small_sets = []
    for ids in lists:
        if len(ids) > limit:
            ids = []
        small_sets.append(ids)
    largest = max(len(ids) for ids in small_sets)
    kept_ids = np.full((len(small_sets), largest), -1, np.int32)
    for row, ids in zip(kept_ids, small_sets, strict=True):
        row[: len(ids)] = ids
    return {"kept_ids": kept_ids}


# --- Most likely tokens.


def top_to_lists(recorded: Mapping[str, np.ndarray]) -> list[list[tuple[int, float]]] | None:
    """The recorded most likely tokens of each token as pairs of id and log-prob; None without a record."""
    if TOP_IDS not in recorded:
        return None
    lists = []
    for ids, logprobs in zip(recorded[TOP_IDS].tolist(), recorded[TOP_LOGPROBS].tolist(), strict=True):
        pairs = zip(ids, logprobs, strict=True)
        lists.append([(token, logprob) for token, logprob in pairs if token >= 0])
    return lists


def top_from_lists(lists: Any, count: int, limit: int) -> dict[str, np.ndarray]:
    """Converts the most likely tokens of a server's reply to recorded arrays; empty unless each token has some.

    Args:
        lists: pairs of id and log-prob of each token, in any order; decoded JSON of any form.
        count: number of tokens.
        limit: number of pairs to keep for each token, the most likely ones.
    """
    if not limit or not isinstance(lists, list) or len(lists) != count:
        return {}
    ids = np.full((count, limit), -1, np.int32)
    logprobs = np.full((count, limit), np.nan, np.float32)
    for row, pairs in enumerate(lists):
        try:
            known = {token: min(float(logprob), 0.0) for token, logprob in pairs if logprob > LOWEST_LOGPROB}
            most_likely = sorted(known.items(), key=lambda pair: -pair[1])[:limit]
            ids[row, : len(most_likely)] = [token for token, _ in most_likely]
            logprobs[row, : len(most_likely)] = [logprob for _, logprob in most_likely]
        except (TypeError, ValueError, OverflowError):
            return {}
        if not most_likely or ids[row, : len(most_likely)].min() < 0:
            return {}
    return {TOP_IDS: ids, TOP_LOGPROBS: logprobs}


# --- Bytes.


def recorded_to_bytes(recorded: Sequence[Mapping[str, np.ndarray]]) -> bytes | None:
    """Converts the recorded arrays of rows to bytes, None without any; `recorded_from_bytes` is the inverse."""
    arrays: dict[str, Any] = {}
    for index, row_arrays in enumerate(recorded):
        for name, values in row_arrays.items():
            arrays[f"{index}/{name}"] = values
    if not arrays:
        return None
    file = io.BytesIO()
    np.savez(file, **arrays)
    return zlib.compress(file.getvalue(), 1)


def recorded_from_bytes(content: bytes | None, lengths: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """Converts the bytes of `recorded_to_bytes` back to the recorded arrays of each row.

    Args:
        lengths: number of tokens in each row.
    Raises:
        UserError: the bytes have another format, or unpack to more than `RECORDED_BYTES` for each token.
    """
    recorded: list[dict[str, np.ndarray]] = [{} for _ in lengths]
    if not content:
        return recorded
    limit = RECORDED_BYTES * (1 + sum(lengths))
    try:
        # A few bytes could fill the memory, because the zlib stream and the zip file inside it may both unpack to far
        # more, so the limit applies to both.
        unpacker = zlib.decompressobj()
        file = io.BytesIO(unpacker.decompress(content, limit))
        size = limit + 1  # more than the limit, unless the stream has ended before it
        if unpacker.eof:
            with zipfile.ZipFile(file) as members:
                size = sum(member.file_size for member in members.infolist())
        if size > limit:
            raise UserError(problem=f"they have more than {limit} bytes, {RECORDED_BYTES} for each token")
        for key, values in np.load(file).items():
            index, _, name = key.partition("/")
            recorded[int(index)][name] = values
    except (
        zlib.error,
        zipfile.BadZipFile,
        TypeError,
        AttributeError,
        EOFError,
        IndexError,
        ValueError,
        MemoryError,
    ) as error:
        raise UserError(
            problem=f"recorded arrays cannot be read ({error})", remedy="restore the file from a backup"
        ) from error
    return recorded
