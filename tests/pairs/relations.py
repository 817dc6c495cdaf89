"""Relations that hold for every run of the array, as functions of a finished run.

A relation takes the case and its finished run, and yields each thing that is wrong; it returns NOT_HERE if it does not
apply. Numbers are compared relative to the largest element.
"""

import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax

from recjax.algorithms.algorithm import Algorithm
from recjax.algorithms.axis import Axis
from recjax.algorithms.batch_advantages import no_advantages
from recjax.config import OptimizerConfig
from recjax.errors import UserError
from recjax.experience.batch import FOREIGN, Batch, row_places, to_learn_from, with_part_weights
from recjax.experience.group import Completion, Group, group_staleness, oldest_version
from recjax.experience.layout import Layout, choose_layout, freely_routed, score
from recjax.experience.packing import RowShape, pack
from recjax.experience.queue import LEFT
from recjax.hub.weights import load_pretrained
from recjax.models.placement import put_rows
from recjax.models.trainable import combine, flatten, is_adapter, unflatten
from recjax.planning.dry_run import dry_run
from recjax.planning.targets import named_devices
from recjax.runs.policies import open_policy
from recjax.store.store import Store
from recjax.training import loop
from recjax.training.update import Averaged, first_state, make_optimizer, update
from tests.pairs.case import Case
from tests.pairs.features import KNOBS
from tests.pairs.running import Finished, Step, mesh_of
from tests.training.tiny_run import without_times

NOT_HERE = "not here"
CLOSE = 2e-5  # of the largest element: the same sums in another order
RATIO = 1e-4  # documented for samplers that are the trainer
PUSHES = ("engine/pushes", "engine/push_seconds", "engine/unusable")


def logged(rows: list[dict]) -> list[dict]:
    """Rows without times, and without the number of weights that a process gave to a server."""
    return [{name: row[name] for name in row if name not in PUSHES} for row in without_times(rows)]


def difference(one: list[dict], other: list[dict], far: float = 0.0) -> str:
    """The first step and the metrics in which two runs differ; empty if they are equal.

    Args:
        far: difference of numbers that count as equal, absolute below 1 and relative above.
    """
    one, other = logged(one), logged(other)
    if len(one) != len(other):
        return f"{len(one)} rows and {len(other)}"
    for row, its in zip(one, other, strict=True):
        names = sorted(name for name in {*row, *its} if not _is_near(row.get(name), its.get(name), far))
        if names:
            values = ", ".join(f"{name} {row.get(name)} and {its.get(name)}" for name in names[:4])
            return f"step {row['step']}: {values}"
    return ""


def _is_near(one: Any, other: Any, far: float) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == other or math.isclose(one, other, rel_tol=far, abs_tol=far)
    return one == other


def distance(one: Any, other: Any) -> float:
    """The largest difference between two trees, relative to the largest element."""
    ours, theirs = ({path: np.asarray(leaf, float) for path, leaf in flatten(tree).items()} for tree in (one, other))
    largest = max((np.abs(leaf).max() for leaf in ours.values() if leaf.size), default=0.0)
    far = max((np.abs(leaf - theirs[path]).max() for path, leaf in ours.items() if leaf.size), default=0.0)
    return far / max(largest, 1e-12)


def is_equal(one: Any, other: Any) -> bool:
    """True if two trees are equal to the last bit."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True) for a, b in pairs)


# --- Runs again.


def same_seed_twice(case: Case, ran: Finished) -> Iterator[str]:
    """The same command gives the same numbers."""
    if {"async", "server"} <= {*case.row.values()}:
        return NOT_HERE  # the clock decides which requests the server computes together, and so how sums are rounded
    again = case.run("again")
    far = _rounding(case)
    if found := difference(ran.rows, again.rows, far):
        yield f"the same command gives other numbers: {found}"
    elif not far and not is_equal(ran.digests, again.digests):
        yield "the same command gives the same metrics and other weights"


def _rounding(case: Case) -> float:
    """How far numbers of two equal runs may be apart: a server's clock decides which requests it computes together."""
    return RATIO if "server" in case.row.values() else 0.0


def killed_and_resumed(case: Case, ran: Finished) -> Iterator[str]:
    """A run that is killed in place of a random update and started again has the numbers of an undisturbed run."""
    if "async" in case.row.values():
        return NOT_HERE
    at = random.Random(zlib.crc32(case.name.encode())).randrange(2, len(ran.steps) + 1)
    killed = case.killed("resumed", at)
    again = case.run("resumed", fresh=False)
    if not killed:
        yield f"it ended before update {at}, although it had {len(ran.steps)} updates before"
    far = _rounding(case)
    if found := difference(ran.rows, again.rows, far):
        yield f"killed in place of update {at} and resumed, it has other numbers: {found}"
    elif not far and not is_equal(ran.digests, again.digests):
        yield f"killed in place of update {at} and resumed, it has the same metrics and other weights"
    ours, theirs = (_records(each) for each in (ran, again))
    if far:
        ours, theirs = (_without_logprobs(records) for records in (ours, theirs))
    if sorted(ours) != sorted(theirs):
        yield f"killed in place of update {at} and resumed, it records {len(theirs)} rows and not the same {len(ours)}"


def resumed_elsewhere(case: Case, ran: Finished) -> Iterator[str]:
    """A run of a mesh that resumes on one device makes the same next step, up to rounding."""
    if "mesh" not in case.row.values() or "async" in case.row.values():
        return NOT_HERE
    case.killed("elsewhere", 4)
    again = case.run("elsewhere", ["mesh.data=1", "mesh.fsdp=1"], fresh=False)
    for name in ("loss", "gradient_norm", "reward"):
        ours, theirs = ran.rows[3][name], again.rows[3][name]
        if not math.isclose(ours, theirs, rel_tol=1e-2, abs_tol=1e-4):
            yield f"resumed on one device, step 3 has {name} {theirs:g} and not {ours:g}"
    if again.config.record_file is not None:
        yield from _unlike_the_record(again)


def two_processes_agree(case: Case, ran: Finished) -> Iterator[str]:
    """Two processes of two devices make the steps of one process of four, which goes on where they end."""
    values = {*case.row.values()}
    # Only where the sampler keeps weights, as two processes take as long as several other relations.
    if "mesh" not in values or not {"interval", "ahead"} & values:
        return NOT_HERE
    if ran.config.task.agent or ran.config.rollout.engine or ran.config.follows:
        return NOT_HERE  # refused with several processes
    case.in_two_processes("processes", ["training.steps=2"])
    again = case.run("processes", fresh=False)
    for row, its in zip(ran.rows[1:], again.rows[1:], strict=True):
        for name in ("loss", "gradient_norm", "reward"):
            if not math.isclose(row[name], its[name], rel_tol=1e-2, abs_tol=1e-4):
                found = f"step {row['step']} has {name} {its[name]:g} and not {row[name]:g}"
                yield f"two processes until step 2, then one: {found}"


def dry_run_agrees(case: Case, ran: Finished) -> Iterator[str]:
    """A run that starts passes the dry run."""
    try:
        result = dry_run(ran.config, named_devices("host") if "mesh" in case.row.values() else None)
    except UserError as error:
        yield f"the run starts, and its dry run is refused: {error}"
        return
    if result.missing:
        yield f"the run starts, and its dry run lacks {result.missing}"
    known = [row["staleness_rows"] for row in ran.rows[1:]]
    if result.staleness and not ran.config.experience:
        promised = result.staleness[: len(known)]
        foretold = [{str(age): 1} for age in promised]
        if [{*ages} for ages in known] != [{*ages} for ages in foretold] and "frozen seat" not in case.row.values():
            yield f"the dry run foretells the staleness {promised}, and the run has {known}"


def has_an_effect(case: Case, ran: Finished) -> Iterator[str]:
    """Another value of a number that belongs to a feature changes weights or metrics."""
    knobs = [(value, *KNOBS[value]) for value in case.row.values() if value in KNOBS]
    applied = False
    for value, option, kind, applies in knobs:
        if not applies(ran):
            continue
        applied = True
        try:
            other = case.run("other", [option])
        except UserError as error:
            yield f"{value}: {option} is refused: {error}"
            continue
        if kind == "weights" and is_equal(ran.digests.params, other.digests.params):
            yield f"{value}: {option} changes no weight"
        elif not difference(ran.rows, other.rows):
            yield f"{value}: {option} changes no metric"
    return None if applied else NOT_HERE


# --- Conservation.


def _key(group: Group, completion: Completion) -> tuple[str, str]:
    # Whole groups of a store may have the ids of this run's groups; `mixed` names completions that join groups.
    if completion.policy_version is None and not completion.id.startswith("store/"):
        return f"stored {group.id}", completion.id
    return group.id, completion.id


def _keys(groups: Sequence[Group]) -> Counter:
    return Counter(_key(group, completion) for group in groups for completion in group.completions)


def nothing_is_lost(case: Case, ran: Finished) -> Iterator[str]:
    """Every completion that arrived is trained on, waits, or is counted under exactly one reason."""
    if not ran.arrived:
        return NOT_HERE
    queue = ran.state.queue
    arrived = _keys(ran.arrived)
    trained = _keys([group for groups in ran.taken.values() for group in groups])
    # A completion whose group left at its deadline is counted, and waits only to be counted as late.
    open_groups = [entry.group for entry in queue.waiting if entry.round is not None]
    waits = _keys([*open_groups, *(entry.group for entry in queue.ready)])
    unknown = {*trained} - {*arrived}
    stored_count = ran.config.stored_groups * len(ran.taken)
    if len(unknown) > 0 and not stored_count:
        yield f"{len(unknown)} completions were trained on that never arrived, such as {sorted(unknown)[0]}"
    gone = {key: count for key, count in arrived.items() if key not in trained and key not in waits}
    groups_gone = {group for group, _ in gone}
    groups_kept = {group for group, _ in [*trained, *waits]}
    lost_groups = groups_gone - groups_kept
    counts = queue.counts
    reasons = {name: counts[name] for name in ("stale", "capacity", "no_signal", "groups_without_reward")}
    replays = ran.config.experience is not None and ran.config.experience.replay is not None
    # With replay a group may leave as stale after it has been trained on.
    is_right = len(lost_groups) <= sum(reasons.values()) if replays else len(lost_groups) == sum(reasons.values())
    # Groups of a mix repeat, so that their keys say nothing of one arrival.
    if not is_right and max(arrived.values()) == 1:
        yield f"{len(lost_groups)} groups are gone, and the counts are {reasons}"
    lost_rows = sum(count for (group, _), count in gone.items() if group not in lost_groups)
    counted = counts["rows_without_reward"]
    of_lost = sum(count for (group, _), count in gone.items() if group in lost_groups)
    if max(arrived.values()) == 1 and not lost_rows <= counted <= lost_rows + of_lost:
        yield f"{lost_rows} completions of kept groups are gone, and {counted} are counted as without a reward"
    if not replays and max(trained.values(), default=0) > 1 and max(arrived.values()) == 1:
        yield "a completion was trained on in two batches"
    logged_counts = {name: ran.rows[-1].get(f"experience/left_out/{name}") for name in LEFT}
    for name, count in logged_counts.items():
        # The row of the last step is that of the queue after it.
        if count is not None and count != counts[name]:
            yield f"experience/left_out/{name} is {count} in the last row, and the queue counts {counts[name]}"


def _records(ran: Finished) -> list[tuple]:
    file = ran.config.record_file
    if file is None or not file.exists():
        return []
    with Store(file) as store:
        return [_content(record.completion) for record in store.records()]


def _without_logprobs(records: list[tuple]) -> list[tuple]:
    return [(*about, tuple(tokens for tokens, _ in rows)) for *about, rows in records]


def _content(completion: Completion) -> tuple:
    rows = tuple(
        (row.tokens.tobytes(), None if row.behavior_logprobs is None else row.behavior_logprobs.tobytes())
        for row in completion.rows
    )
    return completion.id, completion.text, completion.policy_version, rows


def record_is_what_was_trained_on(case: Case, ran: Finished) -> Iterator[str]:
    """Every sampled completion of a batch is in the record as the batch had it, once."""
    if ran.config.record_file is None:
        return NOT_HERE
    recorded = _records(ran)
    names = Counter(name for name, *_ in recorded)
    if doubled := [name for name, count in names.items() if count > 1]:
        yield f"the record has {doubled[0]} twice"
    if unknown := {*names} - {one.id for group in ran.arrived for one in group.completions}:
        yield f"the record has {len(unknown)} completions that the run never got, such as {min(unknown)}"
    yield from _unlike_the_record(ran)


def _unlike_the_record(ran: Finished) -> Iterator[str]:
    """A completion of a batch that the record does not have as the batch had it."""
    contents = {content[0]: content for content in _records(ran)}
    own = [
        completion
        for groups in ran.taken.values()
        for group in groups
        for completion in group.completions
        if completion.source == "policy" and completion.id in {one.id for g in ran.arrived for one in g.completions}
    ]
    for completion in own:
        if not completion.rows:
            continue
        known = contents.get(completion.id)
        if known is None:
            # Stored rows of another run have the source `policy` as well.
            if any(completion.id in {one.id for one in group.completions} for group in ran.recorded):
                yield f"{completion.id} was trained on and is not in the record"
                return
        elif known != _content(completion) and completion.policy_version is not None:
            yield f"{completion.id} is recorded with another text, version, tokens or log-probs than the batch has"
            return


def record_gives_the_same_gradient(case: Case, ran: Finished) -> Iterator[str]:
    """The first batch, read back from the record, gives the gradient that it gave."""
    if ran.config.record_file is None:
        return NOT_HERE
    with Store(ran.config.record_file) as store:
        known = {record.completion.id: record.completion for record in store.records(grader=None)}
    groups = ran.taken[1]
    wanted = [completion for group in groups for completion in group.completions]
    if any(completion.id not in known or not completion.rows for completion in wanted):
        return NOT_HERE  # a mix, or an agent that failed
    graded = {completion.id: completion.grade for completion in wanted}
    read = [
        group._replace(
            completions=tuple(
                known[one.id]._replace(grade=known[one.id].grade or graded[one.id]) for one in group.completions
            )
        )
        for group in groups
    ]
    batch = _learned(ran, loop.padded(ran.run, tuple(read)))
    first = ran.steps[0]
    far = distance(gradient(ran, first), gradient(ran, first, batch=batch))
    if not far <= CLOSE:  # also for numbers that are not finite
        yield f"the record of the first batch gives another gradient: {far:.2g} of the largest element away"


def _learned(ran: Finished, batch: Batch) -> Batch:
    return with_part_weights(to_learn_from(batch, ran.config.task), ran.run.part_weights)


def metrics_add_up(case: Case, ran: Finished) -> Iterator[str]:
    """Counts of a row are those of its batch."""
    for row, step in zip(ran.rows[1:], ran.steps, strict=True):
        batch = step.batch
        real = np.asarray(batch.completion_mask).any(-1)
        if ran.config.task.truncated == "mask":
            real = real | np.asarray(batch.truncated)
        if batch.trajectories is not None:
            real = real & (np.asarray(batch.trajectories) == np.arange(len(real)))
        of_policy = int((np.asarray(batch.policy_version)[real] != FOREIGN).sum())
        if sum(row["staleness_rows"].values()) != of_policy:
            yield f"step {step.number}: staleness_rows {row['staleness_rows']}, and {of_policy} rows have a version"
        reward = float(np.asarray(batch.rewards)[real].mean())
        if not math.isclose(row["reward"], reward, rel_tol=1e-4, abs_tol=1e-5):
            yield f"step {step.number}: reward {row['reward']:g}, and the batch has {reward:g}"
        groups = ran.taken.get(step.number)
        if groups and "source_rows" in row:
            count = sum(len(group.completions) for group in groups)
            if sum(row["source_rows"].values()) != count:
                yield f"step {step.number}: source_rows {row['source_rows']} of {count} completions"
        if groups and len(groups) != ran.config.rollout.prompts_per_step:
            yield f"step {step.number}: {len(groups)} groups in a batch of {ran.config.rollout.prompts_per_step}"


def mix_is_mixed(case: Case, ran: Finished) -> Iterator[str]:
    """Every batch of a mix has stored completions; they have no version of this run."""
    mix = ran.config.experience and ran.config.experience.mix
    if not mix:
        return NOT_HERE
    shares = []
    for step, groups in ran.taken.items():
        joined = [one for g in groups for one in g.completions if one.id.startswith("store/")]
        if any(one.policy_version is not None for one in joined):
            yield f"step {step}: stored completions that join groups have versions of this run"
            return
        stored = [[one.policy_version is None for one in group.completions] for group in groups]
        shares.append(sum(map(sum, stored)))
        whole = sum(map(all, stored))
        if mix.of == "batch" and whole != ran.config.stored_groups:
            yield f"step {step}: {whole} groups come whole from the store, and {ran.config.stored_groups} should"
            return
    # Only problems that the store knows get its completions.
    if mix.of == "group" and sum(shares) == 0:
        yield "no batch has a stored completion without a version of this run"
    elif mix.of == "group" and sum(shares[len(shares) // 2 :]) == 0:
        yield f"stored completions vanish from the batches: {shares}"


def something_is_learned(case: Case, ran: Finished) -> Iterator[str]:
    """A run with rewards that differ, in a group or in a batch that is compared, changes its weights."""
    spreads = []
    for step in ran.steps:
        real = np.asarray(step.batch.completion_mask).any(-1)
        ids = np.asarray(step.batch.group_ids)
        rewards = np.asarray(step.batch.rewards)
        compared = [real] if case.row.get("objective") == "batch baseline" else [real & (ids == i) for i in {*ids}]
        spreads += [np.ptp(rewards[rows]) for rows in compared if rows.any()]
    if not max(spreads, default=0) > 0:
        return NOT_HERE
    if is_equal(ran.steps[0].before.params, ran.digests.params):
        yield "rewards differ, and no step changes a weight"
    if not all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(ran.digests.params)):
        yield "weights are not finite"


# --- One update, again with other arrays or another layout.

_SGD = OptimizerConfig(name="sgd", learning_rate=1.0, clip_norm=math.inf)


def gradient(ran: Finished, step: Step, batch: Batch | None = None, layout: Layout | None = None) -> dict:
    """The gradient of an update's loss."""
    return gradient_and_loss(ran, step, batch, layout)[0]


def gradient_and_loss(
    ran: Finished,
    step: Step,
    batch: Batch | None = None,
    layout: Layout | None = None,
    algorithm: Algorithm | None = None,
    **others: dict,
) -> tuple[dict, float]:
    """The gradient, which is what an SGD step of rate 1 takes off, and the loss of an update.

    Args:
        algorithm: another algorithm, which takes the options of axes that it has from the run's.
        others: parameters of other models, by their names in the update's context.
    """
    learner = ran.learner
    config = ran.config
    recipe = learner._recipe._replace(optimizer=make_optimizer(_SGD, config.model.average_rate))
    with mesh_of(config):
        arrays = put_rows(step.batch if batch is None else batch)
        layout = step.layout if layout is None else layout
        context = learner._context(step.before, step.number, None)
        params = jax.tree.map(jax.device_put, step.before.params, learner.shardings)
        state = first_state(recipe.optimizer, params)
        if config.model.average_rate is not None:
            average = optax.tree.get(step.before.optimizer_state, "average")
            average = jax.tree.map(jax.device_put, average, learner.shardings)
            state = state._replace(optimizer_state=_with_average(state.optimizer_state, average))
        rates = {"learning_rate": 1.0, "clip_norm": math.inf}
        numbers = context.hyperparameters | {"optimizer": rates}
        if algorithm is not None:
            recipe = recipe._replace(algorithm=algorithm)
            options = numbers["algorithm"]
            kept = [axis for axis in options if getattr(algorithm, axis) == getattr(learner._recipe.algorithm, axis)]
            numbers["algorithm"] = {axis: options[axis] for axis in kept}
        context = context._replace(hyperparameters=numbers, proximal_logprobs=step.proximal, **others)
        new, metrics, _ = update(state, arrays, layout, context, recipe=recipe)
        new = jax.device_get(new.params)
    moved = jax.tree.map(lambda before, after: np.asarray(before) - np.asarray(after), step.before.params, new)
    return moved, float(metrics["loss"])


def _with_average(state: Any, average: dict) -> Any:
    is_average = lambda node: isinstance(node, Averaged)  # noqa: E731
    return jax.tree.map(lambda node: Averaged(average) if is_average(node) else node, state, is_leaf=is_average)


def layouts_agree(case: Case, ran: Finished) -> Iterator[str]:
    """Padded rows, packed rows and a micro-batch for each prompt give the same gradient."""
    step = ran.steps[-1]
    training = ran.config.training
    changes = {
        "packed": {"training.tokens_per_micro_batch": 96, "training.micro_batch_prompts": None},
        "padded": {"training.tokens_per_micro_batch": None, "training.micro_batch_prompts": None},
        "a prompt each": {"training.tokens_per_micro_batch": None, "training.micro_batch_prompts": 1},
    }
    expected = gradient(ran, step)
    layouts: dict[str, Layout] = {}
    for name, change in changes.items():
        try:
            config = ran.config.replace(**change)
        except UserError:
            continue
        recipe = ran.learner._recipe
        with mesh_of(ran.config):
            try:
                layout = choose_layout(
                    config, recipe.algorithm, recipe.decoder, step.batch, step.layout.rows, None, teacher=recipe.teacher
                )
            except UserError:
                continue
            shards = 4 if "mesh" in case.row.values() else 1
        rows = len(step.batch.prompts) // training.minibatches
        if layout.packed is None and rows % (layout.parts * shards):
            continue
        if _same_layout(layout, step.layout):
            continue
        layouts[name] = layout
    layouts |= _other_layouts(ran, step)
    for name, layout in layouts.items():
        far = distance(expected, gradient(ran, step, layout=layout))
        if not far <= CLOSE:  # also for numbers that are not finite
            yield f"the gradient with {name} rows is {far:.2g} of the largest element away"
    return None if layouts else NOT_HERE


def _other_layouts(ran: Finished, step: Step) -> dict[str, Layout]:
    """Layouts of packed rows that no config chooses: without packing, and without shared beginnings."""
    if step.layout.packed is None:
        return {}
    rows = step.batch.completion_mask
    if step.layout.rows is not None:
        rows = rows & np.asarray(step.layout.rows)[:, None]
    shape = RowShape(len(step.batch.rewards), step.layout.packed.tokens.shape[-1])
    packed = pack(step.batch._replace(completion_mask=rows), shape, share=False, most=1)
    kept = {"rows": step.layout.rows, "minibatches": step.layout.minibatches}
    layouts = {"packed, but not shared,": Layout(packed=packed, **kept)}
    if step.layout.rows is None:  # minibatches of trajectories have any number of rows, which only packing allows
        layouts["unpacked"] = Layout()
    return layouts


def _same_layout(one: Layout, other: Layout) -> bool:
    if (one.packed is None) != (other.packed is None):
        return False
    if one.packed is None:
        return one.parts == other.parts
    return other.packed is not None and one.packed.tokens.shape == other.packed.tokens.shape


def _turned(batch: Batch) -> tuple[np.ndarray, Batch]:
    """The order of the rows in which groups, and the completions of each, are reversed, and the batch in this order."""
    groups = np.asarray(batch.group_ids)
    rows = len(groups)
    prompts = len(batch.prompts)
    completions = np.arange(rows) if batch.trajectories is None else np.asarray(batch.trajectories)
    # Rows of one completion stay in their order.
    order = np.lexsort((np.arange(rows), -completions, -groups))

    def turned(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x)
        if len(x) == rows:
            return x[order]
        return x[::-1].copy() if len(x) == prompts else x

    ids = (groups.max() - groups[order]).astype(np.int32)
    changed = jax.tree.map(turned, batch)._replace(group_ids=ids)
    if batch.trajectories is not None:
        _, first, number = np.unique(completions[order], return_index=True, return_inverse=True)
        changed = changed._replace(trajectories=first[number].astype(np.int32))
    return order, changed


def order_of_rows_is_nothing(case: Case, ran: Finished) -> Iterator[str]:
    """The gradient does not depend on the order of groups, nor on that of the completions in a group."""
    if case.row.get("objective") == "selection":
        return NOT_HERE  # it drops completions at random
    step = ran.steps[-1]
    order, batch = _turned(step.batch)
    layout = step.layout
    proximal = step.proximal
    if proximal is not None:
        proximal = np.asarray(proximal)[order]
    recipe = ran.learner._recipe
    with mesh_of(ran.config):
        layout = choose_layout(
            ran.config,
            recipe.algorithm,
            recipe.decoder,
            batch,
            None if layout.rows is None else np.asarray(layout.rows)[order],
            doublings=layout.doublings,
            teacher=recipe.teacher,
        )
    turned = gradient(ran, step._replace(proximal=proximal), batch=batch, layout=layout)
    far = distance(gradient(ran, step), turned)
    if not far <= CLOSE:  # also for numbers that are not finite
        yield f"with the rows in another order the gradient is {far:.2g} of the largest element away"


OTHER_TERMS = ("teacher", "terms")


def rewards_are_compared(case: Case, ran: Finished) -> Iterator[str]:
    """Equal rewards give no gradient, shifted ones the same, and scaled ones the same if they are normalized."""
    row = case.row
    alone = all(axis not in row for axis in OTHER_TERMS) and row.get("completions") != "observed turns"
    objective = row.get("objective", "grpo")
    step = ran.steps[0]
    batch = step.batch
    rewards = np.asarray(batch.rewards)
    if objective == "parts":
        parts = {name: np.ones_like(np.asarray(values)) for name, values in batch.reward_parts.items()}
        own = {"turns", "rows", "length"}
        kept = {name: values if name not in own else batch.reward_parts[name] for name, values in parts.items()}
        equal = batch._replace(reward_parts=kept, rewards=np.ones_like(rewards))
    else:
        equal = batch._replace(rewards=np.ones_like(rewards))
    if batch.turn_rewards is not None:
        turns = np.zeros_like(np.asarray(batch.turn_rewards))
        turns = np.where(np.isnan(batch.turn_rewards), np.nan, turns)
        equal = equal._replace(turn_rewards=turns.astype(np.float32))
    is_centered = row.get("groups") != "single"
    imitates = objective == "expert" and (np.asarray(batch.policy_version) == FOREIGN).any()
    algorithm = ran.learner._recipe.algorithm
    others = (algorithm.objective, algorithm.regularizer, algorithm.term)
    if not is_centered or imitates or not (alone or others == (None, None, None)):
        return NOT_HERE
    expected = gradient(ran, step)
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    left = gradient(ran, step, batch=equal)
    if not alone:
        # What is left are the other terms, which read rewards only where a selection drops completions by them.
        without = replace(algorithm, advantage=Axis(no_advantages))
        terms = gradient_and_loss(ran, step, batch=equal, algorithm=without)[0]
        left = jax.tree.map(lambda ours, theirs: ours - theirs, left, terms)
    found = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(left))
    # A loss of pairs and a penalty on the ratio also pull the policy to the sampler.
    pulls = algorithm.objective is not None or algorithm.log_ratio_penalty is not None
    if found > 1e-5 * max(largest, 1.0) and not pulls:
        yield f"with equal rewards the policy gradient is {found:.2g}, and with the run's own rewards {largest:.2g}"
    if objective == "parts" or batch.turn_rewards is not None:
        return
    shifted = gradient(ran, step, batch=batch._replace(rewards=(rewards + 2).astype(np.float32)))
    if distance(expected, shifted) > 1e-4 and largest > 1e-6:
        yield f"rewards that are 2 higher change the gradient by {distance(expected, shifted):.2g}"
    if objective in ("grpo", "batch baseline", "sequence ratio", "proximal") and largest > 1e-6:
        scaled = gradient(ran, step, batch=batch._replace(rewards=(rewards * 3).astype(np.float32)))
        if distance(expected, scaled) > 1e-3:
            yield f"rewards times 3 change the gradient of normalized ones by {distance(expected, scaled):.2g}"


# --- Versions, ratios and other models.


def _params(ran: Finished) -> Mapping[int, dict]:
    """The trained parameters by policy version."""
    return {step.number - 1: step.before.params for step in ran.steps}


def rows_are_of_the_weights_that_they_name(case: Case, ran: Finished) -> Iterator[str]:
    """The log-probs of a row are those of the version that it names, which the regime allows."""
    # Version 0 in a store is taken for this run's initial policy, which it need not be.
    is_stored = ran.config.experience is not None and ran.config.experience.store
    if {"noise", "exact log-probs"} & {*case.row.values()} or is_stored:
        return NOT_HERE
    params = _params(ran)
    policy = ran.learner._policy
    config = ran.config
    seen: set[tuple] = set()
    applied = False
    limit = config.regime.max_staleness
    replay = config.experience and config.experience.replay
    if replay and replay.max_staleness is not None:
        limit = replay.max_staleness if limit is None else min(limit, replay.max_staleness)
    for step in ran.steps:
        batch = step.batch
        versions = np.asarray(batch.policy_version)
        real = np.asarray(batch.completion_mask).any(-1)
        ages = step.number - 1 - versions[real & (versions != FOREIGN)]
        if ages.size and ages.min() < 0:
            yield f"step {step.number}: rows of a later version than the weights that train on them"
        if limit is not None and ages.size and ages.max() > limit:
            yield f"step {step.number}: a row is {ages.max()} steps old, and at most {limit} are allowed"
        if case.row.get("regime") == "offline" and "frozen seat" not in case.row.values() and (versions > 0).any():
            yield f"step {step.number}: offline, rows have the versions {np.unique(versions)}"
        if batch.behavior_logprobs is None or "swap" in case.name:
            continue
        for version in np.unique(versions[real & (versions != FOREIGN)]).tolist():
            rows = real & (versions == version)
            key = (version, np.asarray(batch.completions)[rows].tobytes())
            if version not in params or key in seen:
                continue
            seen.add(key)
            applied = True
            with mesh_of(config):
                frozen = ran.learner.frozen
                own = combine(params[version], frozen)
                scored = score(
                    policy.decoder, own, batch, config.rollout.sampling(), config.model.logprob_chunk, step.layout
                )
            mask = np.asarray(batch.completion_mask) & rows[:, None]
            if step.layout.rows is not None:
                mask &= np.asarray(step.layout.rows)[:, None]
            known = np.asarray(batch.behavior_logprobs)
            far = np.abs(np.exp(scored - known) - 1)[mask & np.isfinite(known)]
            if far.size and not far.max() <= RATIO:
                yield (
                    f"step {step.number}: rows of version {version} have log-probs whose ratio to those of that version"
                    f" is {far.max():.2g} from 1"
                )
                return
    return None if applied else NOT_HERE


def versions_are_those_promised(case: Case, ran: Finished) -> Iterator[str]:
    """A batch has the versions that the page of regimes promises: of own rows, replayed, stored and foreign ones."""
    config = ran.config
    regime = config.regime
    experience = config.experience
    updates = config.training.updates
    if regime.mode == "async":
        return NOT_HERE  # only a bound is promised, which the log-probs' relation checks

    def sampled_by(batch: int) -> int:
        if regime.offline:
            return 0
        round_ = max(batch - regime.sync_offset, 0)
        return round_ // regime.sync_interval * regime.sync_interval * updates

    for step in ran.steps:
        groups = ran.taken.get(step.number)
        if groups is None:
            continue  # not the first update of its batch
        batch = (step.number - 1) // updates
        promised: set[int | None] = {sampled_by(batch)}
        waits = experience and (experience.late or experience.replay or experience.refill)
        # A group of the next batch replaces one without rewards.
        if waits or ran.state.queue.counts["groups_without_reward"]:
            promised = {*map(sampled_by, range(batch + 1))}
        drawn = ran.rows[step.number].get("experience/drawn_batches", 0)
        every = experience.replay.draw_every if experience and experience.replay else 1
        if (drawn - 1) * every > batch + regime.sync_offset:
            # Rounds went by without a step, so that the sampler came nearer than its offset.
            promised |= {number * updates for number in range(batch + 1)}
        if "frozen seat" in case.row.values():
            promised.add(0)
        if experience and experience.store:
            promised = {0, None}
        completions = [one for group in groups for one in group.completions]
        if experience and experience.mix:
            completions = [one for one in completions if one.policy_version is not None]
        versions = {one.policy_version for one in completions}
        if not versions <= promised:
            yield f"step {step.number}: rows of the versions {versions}, and the regime promises {promised}"
            return
        limit = regime.max_mean_staleness
        ages = [group_staleness(group, step.number) for group in groups if oldest_version(group) is not None]
        if limit is not None and ages and sum(ages) / len(ages) + updates - 1 > limit:
            yield f"step {step.number}: groups of the staleness {ages}, whose mean should be at most {limit:g}"
            return
        named = Counter(
            FOREIGN if one.policy_version is None else one.policy_version
            for group in groups
            for one in group.completions
            for row in one.rows
        )
        batched = Counter(np.asarray(step.batch.policy_version)[row_places(groups, step.batch.shape)].tolist())
        if named != batched:
            yield f"step {step.number}: groups of the versions {dict(named)}, and a batch of {dict(batched)}"
            return


def fresh_ratios_are_one(case: Case, ran: Finished) -> Iterator[str]:
    """The first update of rows of age 0, and of rows that the current policy scored, has π/μ = 1."""
    is_stored = ran.config.experience is not None and ran.config.experience.store
    if {"noise", "exact log-probs"} & {*case.row.values()} or is_stored:
        return NOT_HERE
    current = ran.config.experience is not None and ran.config.experience.missing_logprobs == "current"
    replays = ran.config.experience is not None and ran.config.experience.replay is not None
    applied = False
    for step in ran.steps:
        batch = step.batch
        if batch.behavior_logprobs is None or step.number not in ran.taken:
            continue
        versions = np.asarray(batch.policy_version)
        rows = versions == step.number - 1
        if current and not replays:
            rows = rows | (versions == FOREIGN)
        mask = np.asarray(batch.completion_mask) & rows[:, None]
        if step.layout.rows is not None:
            mask &= np.asarray(step.layout.rows)[:, None]
        known = np.asarray(batch.behavior_logprobs)
        if not mask.any():
            continue
        applied = True
        far = np.abs(np.exp(step.logprobs - known) - 1)[mask]
        if not far.max() <= RATIO:
            yield f"step {step.number}: π/μ of fresh rows is {far.max():.2g} from 1"
            return
    return None if applied else NOT_HERE


def _promised_models(ran: Finished) -> dict[str, dict]:
    """Parameters of models of their own, by their names in the update's context, as their files have them."""
    model = ran.config.model
    promised = {}
    with mesh_of(ran.config):
        if ran.learner.teacher is not None:
            promised["teacher_params"] = load_pretrained(model.teacher)[1]
        if ran.learner.reference is not None:
            promised["reference_params"] = ran.steps[0].before.params
            if model.reference:
                named = open_policy(model.reference).params
                # Adapters of the policy that change nothing.
                own = flatten(combine(ran.steps[0].before.params, ran.learner.frozen))
                adapters = {path: np.zeros_like(leaf) for path, leaf in own.items() if is_adapter(path)}
                promised["reference_params"] = combine(named, unflatten(adapters))
    return promised


def _teacher_alone(ran: Finished, step: Step) -> str:
    """How the metric of a teacher of its own differs from that of its log-probs, scored alone; empty if it does not."""
    teacher = ran.learner.teacher
    if teacher is None or "teacher_kl" not in step.metrics or step.batch.teacher_prompts is not None:
        return ""
    with mesh_of(ran.config):
        options = (ran.config.rollout.sampling(), ran.config.model.logprob_chunk, step.layout)
        scored = score(teacher.decoder, teacher.params, freely_routed(step.batch), *options)
    mask = np.asarray(step.batch.completion_mask) & np.isfinite(scored) & np.isfinite(step.logprobs)
    if step.layout.rows is not None:
        mask &= np.asarray(step.layout.rows)[:, None]
    alone = float((step.logprobs - scored)[mask].mean())
    own = float(step.metrics["teacher_kl"])
    if math.isclose(alone, own, rel_tol=1e-3, abs_tol=1e-4):
        return ""
    return f"step {step.number}: teacher_kl is {own:.4g}, and with the teacher scored alone {alone:.4g}"


def _other_loss(ran: Finished, step: Step, models: dict[str, dict]) -> str:
    """How the loss of a step differs from that with these other models; empty if it does not."""
    loss = gradient_and_loss(ran, step, **models)[1]
    own = float(step.metrics["loss"])
    if math.isclose(loss, own, rel_tol=1e-4, abs_tol=1e-5):
        return ""
    return f"step {step.number}: the loss is {own:.6g}, and with the promised {' and '.join(models)} {loss:.6g}"


def other_models_are_those_of_the_page(case: Case, ran: Finished) -> Iterator[str]:
    """The reference stays, a teacher's average follows the weights, and the reference is scored as it is."""
    applied = False
    config = ran.config
    rate = config.model.average_rate
    promised = _promised_models(ran)
    if promised:
        applied = True
    if rate is not None:
        applied = True
        expected = ran.steps[0].before.params
        for step in ran.steps:
            average = optax.tree.get(step.before.optimizer_state, "average")
            if step.number > 1:
                expected = jax.tree.map(lambda old, new: old + rate * (new - old), expected, step.before.params)
            if config.model.run and rate > 0 and step.number == 1:
                expected = average  # it continues
            if distance(expected, average) > 1e-5:
                yield f"step {step.number}: the teacher's average is not that of rate {rate}"
                return
            if found := _other_loss(ran, step, promised | {"teacher_params": combine(average, ran.learner.frozen)}):
                yield found
                return
    else:
        yield from filter(None, (_other_loss(ran, step, promised) for step in ran.steps if promised))
    yield from filter(None, (_teacher_alone(ran, step) for step in ran.steps))
    reference = ran.learner.reference
    if reference is not None:
        applied = True
        if not config.model.reference and distance(ran.steps[0].before.params, jax.device_get(reference)) > 1e-6:
            yield "the reference is not the policy before the first step"
        step = ran.steps[-1]
        whole = reference if config.model.reference else combine(reference, ran.learner.frozen)
        with mesh_of(config):
            free = freely_routed(step.batch)
            options = (config.rollout.sampling(), config.model.logprob_chunk, step.layout)
            scored = score(ran.learner._policy.decoder, whole, free, *options)
        mask = np.asarray(step.batch.completion_mask)
        if step.layout.rows is not None:
            mask = mask & np.asarray(step.layout.rows)[:, None]
        change = (scored - step.logprobs)[mask]
        k3 = float(np.mean(np.exp(change) - change - 1))
        # Without a policy gradient and other terms, the loss is the KL alone, a mean over tokens.
        kl = Algorithm(advantage=Axis(no_advantages), reference_kl=ran.learner._recipe.algorithm.reference_kl)
        loss = gradient_and_loss(ran, step, algorithm=kl)[1] / 0.2
        if not math.isclose(loss, k3, rel_tol=1e-3, abs_tol=1e-5):
            yield f"the KL to the reference is {loss:.4g} in the loss, and scored alone it is {k3:.4g}"
    return None if applied else NOT_HERE


RELATIONS: Mapping[str, Callable[[Case, Finished], Iterator[str]]] = {
    function.__name__: function
    for function in (
        metrics_add_up,
        nothing_is_lost,
        mix_is_mixed,
        record_is_what_was_trained_on,
        something_is_learned,
        fresh_ratios_are_one,
        rows_are_of_the_weights_that_they_name,
        versions_are_those_promised,
        other_models_are_those_of_the_page,
        same_seed_twice,
        killed_and_resumed,
        resumed_elsewhere,
        two_processes_agree,
        dry_run_agrees,
        rewards_are_compared,
        order_of_rows_is_nothing,
        layouts_agree,
        record_gives_the_same_gradient,
        has_an_effect,
    )
}


def problems(relation: str, case: Case, ran: Finished) -> list[str] | None:
    """The problems that a relation finds; None if it does not apply to the run."""
    found: list[str] = []
    generator = RELATIONS[relation](case, ran)
    while True:
        try:
            found.append(next(generator))
        except StopIteration as stop:
            return None if stop.value == NOT_HERE else found
