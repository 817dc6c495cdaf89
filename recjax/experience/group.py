"""Groups: one prompt and its completions, the record that passes from the sampler to the update."""

import io
import itertools
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from recjax.errors import UserError
from recjax.models.sampling import KEPT, TOP_IDS, TOP_LOGPROBS, Sampling

LOWEST_LOGPROB = -9000.0  # in nats; servers write -9999 for a log-prob of minus infinity
RECORDED_BYTES = 2**17  # of a token, at most: a bit for each token of a vocabulary of a million, or 32,768 numbers


class Grade(NamedTuple):
    """The grade of a completion.

    reward: weighted sum of the reward parts; None if the reward function gave no reward; training skips such
        completions.
    reward_parts: unweighted terms of the reward, by name; None if the reward has no parts.
    accurate: True if the answer is right, independent of other reward terms; None: not known.
    failure: one of `recjax.rewards.pool.FAILURES`; None for a grade from a store.
    turns: part of the reward that each turn got, weighted; empty if turns have no rewards. The reward is the total: the
        part that no turn got belongs to the end of the last turn.
    """

    reward: float | None
    reward_parts: dict[str, float] | None = None
    accurate: bool | None = None
    failure: str | None = None
    turns: tuple[float, ...] = ()

    @classmethod
    def from_json(cls, values: Sequence) -> "Grade":
        """The grade whose fields are the values of a JSON list."""
        *values, turns = values
        return cls(*values, turns=tuple(turns))


class Row(NamedTuple):
    """A token sequence with one or more turns of a policy; every turn has all earlier tokens as context.

    prompt_tokens: tokens before the first turn.
    tokens: all later tokens: the turns, each with its end-of-sequence token, and the text between them.
    mask: True at tokens that the behavior policy chose.
    behavior_logprobs: log-probs under the distribution that sampled the tokens, 0 where mask is False; None: not known.
    recorded: other arrays that the sampler recorded for each token, by name, [time, …]; `missing_value` where it
        recorded nothing.
    """

    prompt_tokens: Int[np.ndarray, " prompt_time"]
    tokens: Int[np.ndarray, " time"]
    mask: Bool[np.ndarray, " time"]
    behavior_logprobs: Float[np.ndarray, " time"] | None
    recorded: Mapping[str, np.ndarray] = {}


class Turn(NamedTuple):
    """A reply in a trajectory: the sampled tokens between the end of the row's previous turn and its own end.

    row: index of the row that contains the turn, from 0.
    end: index after the turn's last token in the row's tokens.
    """

    row: int
    end: int


class Completion(NamedTuple):
    """One answer to a group's prompt, from any source, with one or many turns; host arrays of any length.

    A single turn has one row, and its prompt is the group's. An agent's trajectory is one completion too, with one
    grade, one advantage and usually one row. A turn starts another row if it does not extend the tokens before it,
    because the template dropped text or the context was cut.

    id: unique in a run and in a store.
    source: name of the sampler.
    text: the reply without its end token.
    rows: token sequences, in order of their first turns; empty for an agent that failed before its first turn.
    sampling: distribution that sampled the tokens; None: not known.
    policy_version: optimizer updates of the weights that sampled the completion, or of the oldest such weights; None
        for a completion of another model.
    truncated: True if the completion reached the token limit.
    grade: None until the completion is graded.
    version_runs: pairs (policy version, number of tokens) for the sampled tokens of all rows in order, if the weights
        changed during sampling; empty: all tokens have `policy_version`.
    turns: turns of an agent's trajectory, in order; empty: the tokens of its only row are a single turn.
    metadata: JSON values from the source, by name; `task` of a mixture, `seat` of an agent with seats.
    """

    id: str
    source: str
    text: str
    rows: tuple[Row, ...]
    sampling: Sampling | None
    policy_version: int | None
    truncated: bool
    grade: Grade | None = None
    version_runs: tuple[tuple[int, int], ...] = ()
    turns: tuple[Turn, ...] = ()
    metadata: Mapping[str, Any] = {}

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy chose, in all rows."""
        return sum(int(np.count_nonzero(row.mask)) for row in self.rows)

    @property
    def known_grade(self) -> Grade:
        """The grade of a completion that has one."""
        assert self.grade is not None
        return self.grade


class Group(NamedTuple):
    """One prompt and any number of completions from any sources. Algorithms compare rewards inside a group.

    prompt_tokens: tokens of the prompt as the model reads it.
    prompt: text of the prompt, or the messages of a chat.
    answer: reference answer; None: not known.
    """

    id: str
    prompt_tokens: Int[np.ndarray, " prompt_time"]
    completions: tuple[Completion, ...]
    prompt: str | list[dict[str, str]]
    answer: str | None = None

    @property
    def seat(self) -> str | None:
        """The seat of an agent that sampled the completions; None without seats."""
        # A seat's completions have a group of their own, so that the first one speaks for all.
        return next((completion.metadata.get("seat") for completion in self.completions), None)


def completion_turns(completion: Completion) -> tuple[Turn, ...]:
    """The turns; a completion with one row and no recorded turns is a single turn.

    Raises:
        UserError: several rows without turns.
    """
    if completion.turns or len(completion.rows) == 1:
        return completion.turns or (Turn(0, len(completion.rows[0].tokens)),)
    raise UserError(
        f"row {completion.id!r}",
        f"has {len(completion.rows)} token sequences without turns",
        "choose an advantage that compares whole trajectories, or remove the row",
    )


def turn_rewards(completion: Completion) -> Float[np.ndarray, " turns"]:
    """The reward of each turn; the last turn also gets the part of the completion's reward that no turn got."""
    grade = completion.known_grade
    assert grade.reward is not None
    rewards = np.array(grade.turns or [0.0] * len(completion_turns(completion)))
    rewards[-1] += grade.reward - rewards.sum()
    return rewards.astype(np.float32)


def is_whole(group: Group) -> bool:
    """True if every completion is graded."""
    return all(completion.grade is not None for completion in group.completions)


def with_grades(groups: Sequence[Group], grades: Sequence[Grade]) -> list[Group]:
    """The groups with a grade for each completion that has none, in order."""
    # Completions that arrive with a grade, such as stored ones, keep it.
    lacking = [completion for group in groups for completion in group.completions if completion.grade is None]
    graded = iter([completion._replace(grade=grade) for completion, grade in zip(lacking, grades, strict=True)])
    return [
        group._replace(
            completions=tuple(completion if completion.grade else next(graded) for completion in group.completions)
        )
        for group in groups
    ]


def rewards(group: Group) -> np.ndarray:
    """The rewards of all graded completions."""
    return np.array([completion.grade.reward for completion in group.completions if completion.grade], np.float64)


def reward_spread(group: Group) -> float:
    """The highest minus the lowest reward; at 0, a group-relative algorithm learns nothing from the group."""
    return float(np.ptp(rewards(group))) if len(rewards(group)) else 0.0


def oldest_version(group: Group) -> int | None:
    """The lowest policy version of the group's completions; None if other models sampled all."""
    versions = [completion.policy_version for completion in group.completions]
    return min((version for version in versions if version is not None), default=None)


def runs_of(versions: Int[np.ndarray, " tokens"]) -> tuple[tuple[int, int], ...]:
    """Converts a policy version per token to the format of `Completion.version_runs`."""
    # Most completions have one version, which `Completion.policy_version` says already.
    if (versions[1:] == versions[:-1]).all():
        return ()
    return tuple((version, len(list(same))) for version, same in itertools.groupby(versions.tolist()))


def token_staleness(groups: Sequence[Group], step: int) -> float | None:
    """Mean staleness of the sampled tokens, in optimizer steps; None if there are no tokens of this policy.

    Args:
        step: number of the step that trains on the groups, from 1.
    """
    known = [
        completion for group in groups for completion in group.completions if completion.policy_version is not None
    ]
    runs = [
        run
        for completion in known
        for run in completion.version_runs or ((completion.policy_version, completion.sampled_tokens),)
    ]
    tokens = sum(count for _, count in runs)
    # Step 1 trains on samples of version 0, which are not stale.
    return (
        sum((step - 1 - version) * count for version, count in runs if version is not None) / tokens if tokens else None
    )


def group_staleness(group: Group, step: int) -> int:
    """Optimizer steps from the oldest weights that sampled a completion to the weights that train on it at `step`.

    Ignores completions of other models; 0 for a group that consists only of such completions.
    """
    # A group is trained on as a whole, so its oldest completion decides.
    version = oldest_version(group)
    return 0 if version is None else step - 1 - version


# --- Arrays that a sampler recorded for each token.


def missing_value(dtype: np.dtype) -> float:
    """The value of recorded arrays at tokens without a record: -1, or NaN for floats; 0 for unsigned integers."""
    return {"f": np.nan, "i": -1}.get(np.dtype(dtype).kind, 0)


def join_recorded(parts: Iterable[tuple[Mapping[str, np.ndarray], int]]) -> dict[str, np.ndarray]:
    """Joins the recorded arrays of token sequences end to end, padded to the largest shape of a token.

    Args:
        parts: recorded arrays and number of tokens of each sequence.
    """
    parts = list(parts)
    tokens = sum(count for _, count in parts)
    joined = {}
    for name in dict.fromkeys(name for recorded, _ in parts for name in recorded):
        known = [recorded[name] for recorded, _ in parts if name in recorded]
        # Turns may have recorded sets of different sizes, and text between turns has no record.
        of_token = np.max([values.shape[1:] for values in known], axis=0).astype(int)
        joined[name] = np.full((tokens, *of_token), missing_value(known[0].dtype), known[0].dtype)
        start = 0
        for recorded, count in parts:
            if name in recorded:
                inside = map(slice, recorded[name].shape[1:])
                joined[name][(slice(start, start + count), *inside)] = recorded[name]
            start += count
    return joined


def has_sets(
    recorded: Mapping[str, np.ndarray], mask: Bool[np.ndarray, "*rows time"]
) -> Bool[np.ndarray, "*rows time"]:
    """True for the tokens in `mask` with a recorded set, see `recjax.models.logprobs.kept_tokens`."""
    # A set has at least the token itself, so a token without any entry has no set.
    known = [(values > missing_value(values.dtype)).any(-1) for name, values in recorded.items() if name in KEPT]
    return mask & np.any([np.zeros_like(mask), *known], axis=0)


def sets_to_lists(recorded: Mapping[str, np.ndarray]) -> list[list[int]] | None:
    """The recorded set of each token as ids in order, empty for a token without a set; None without recorded sets."""
    lists = None
    if "kept_ids" in recorded:
        lists = [sorted(ids[ids >= 0].tolist()) for ids in recorded["kept_ids"]]
    if "kept_bits" in recorded:
        of_bits = [np.flatnonzero(bits).tolist() for bits in np.unpackbits(recorded["kept_bits"], axis=-1)]
        lists = of_bits if lists is None else [ids or more for ids, more in zip(lists, of_bits, strict=True)]
    return lists


def sets_from_lists(lists: Any, tokens: Sequence[int], most: int) -> dict[str, np.ndarray]:
    """The sets of a server's reply as recorded arrays; empty unless each list of ids has its token or is empty.

    Args:
        lists: decoded JSON of any form; a token with an empty list has no set.
        most: largest set to keep; a token with a larger set has none.
    """
    # A server's reply may hold anything: lists that do not fit the tokens are no sets.
    are_lists = isinstance(lists, list) and len(lists) == len(tokens) and all(isinstance(ids, list) for ids in lists)
    if not most or not are_lists or not any(lists):
        return {}
    if not all(not ids or token in ids for token, ids in zip(tokens, lists, strict=True)):
        return {}
    # `type` and not isinstance, as JSON's true would pass for 1; ids must fit int32.
    if not all(type(token) is int and 0 <= token < 2**31 for ids in lists for token in ids):
        return {}
    lists = [ids if len(ids) <= most else [] for ids in lists]
    kept = np.full((len(lists), max(map(len, lists))), -1, np.int32)
    for row, ids in zip(kept, lists, strict=True):
        row[: len(ids)] = ids
    return {"kept_ids": kept}


def top_to_lists(recorded: Mapping[str, np.ndarray]) -> list[list[tuple[int, float]]] | None:
    """The recorded most likely tokens of each token as pairs of id and log-prob; None without a record."""
    if TOP_IDS not in recorded:
        return None
    pairs = zip(recorded[TOP_IDS].tolist(), recorded[TOP_LOGPROBS].tolist(), strict=True)
    return [
        [(token, logprob) for token, logprob in zip(ids, logprobs, strict=True) if token >= 0]
        for ids, logprobs in pairs
    ]


def top_from_lists(lists: Any, count: int, most: int) -> dict[str, np.ndarray]:
    """The most likely tokens of a server's reply as recorded arrays; empty unless each token has some.

    Args:
        lists: pairs of id and log-prob of each token, in any order; decoded JSON of any form.
        count: number of tokens.
        most: largest number of pairs to keep for each token, which are the most likely.
    """
    if not most or not isinstance(lists, list) or len(lists) != count:
        return {}
    ids = np.full((count, most), -1, np.int32)
    logprobs = np.full((count, most), np.nan, np.float32)
    for row, pairs in enumerate(lists):
        try:
            known = {token: min(float(logprob), 0.0) for token, logprob in pairs if logprob > LOWEST_LOGPROB}
            ordered = sorted(known.items(), key=lambda pair: -pair[1])[:most]
            ids[row, : len(ordered)] = [token for token, _ in ordered]
            logprobs[row, : len(ordered)] = [logprob for _, logprob in ordered]
        except (TypeError, ValueError, OverflowError):
            return {}
        if not ordered or ids[row, : len(ordered)].min() < 0:
            return {}
    return {TOP_IDS: ids, TOP_LOGPROBS: logprobs}


def recorded_to_bytes(rows: Sequence[Row]) -> bytes | None:
    """Converts the recorded arrays of rows to bytes, None without any; `recorded_from_bytes` is the inverse."""
    arrays: dict[str, Any] = {
        f"{number}/{name}": values for number, row in enumerate(rows) for name, values in row.recorded.items()
    }
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
        # A file of a few bytes could fill the memory: packed, packed once more, or by a size that it only claims.
        unpacker = zlib.decompressobj()
        file = io.BytesIO(unpacker.decompress(content, limit))
        size = limit + 1
        if unpacker.eof:
            with zipfile.ZipFile(file) as members:
                size = sum(member.file_size for member in members.infolist())
        if size > limit:
            raise UserError(problem=f"they have more than {limit} bytes, {RECORDED_BYTES} for each token")
        for key, values in np.load(file).items():
            number, _, name = key.partition("/")
            recorded[int(number)][name] = values
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
