"""What would make a run that is too large for its devices fit: changes of the config, the cheapest first."""

from collections.abc import Iterator
from typing import NamedTuple

from recjax.models.decoder import REMAT
from recjax.planning.ahead import PROGRAMS, Plan


class Change(NamedTuple):
    """Overrides of the config, what they cost, and the programs that they change."""

    overrides: tuple[str, ...]
    cost: str
    programs: tuple[str, ...]


def changes(plan: Plan, too_large: set[str]) -> Iterator[Change]:
    """Changes that may make programs fit, the cheapest first: one by one, then together.

    Args:
        too_large: names of programs, out of `recjax.planning.ahead.PROGRAMS`.
    """
    splits, recomputed, smaller, shorter = _more_fsdp(plan), _remat(plan), _smaller_parts(plan), _shorter_cache(plan)
    for change in (*splits, *recomputed, *smaller, *shorter):
        if too_large <= {*change.programs}:
            yield change
    strongest = [kind[-1] for kind in (splits, recomputed, smaller, shorter) if kind]
    for number in range(2, len(strongest) + 1):
        together = strongest[:number]
        programs = {name for change in together for name in change.programs}
        if too_large <= programs:
            yield Change(
                tuple(override for change in together for override in change.overrides),
                "; ".join(change.cost for change in together),
                tuple(name for name in PROGRAMS if name in programs),
            )


def _more_fsdp(plan: Plan) -> list[Change]:
    """More and more devices moved from the mesh's data axis to fsdp."""
    sizes, found = plan.mesh.shape, []
    factors = [factor for factor in range(2, sizes["data"] + 1) if sizes["data"] % factor == 0]
    for factor in factors:
        overrides = (f"mesh.data={sizes['data'] // factor}", f"mesh.fsdp={sizes['fsdp'] * factor}")
        found.append(Change(overrides, "weights travel between more devices", PROGRAMS))
    return found


def _remat(plan: Plan) -> list[Change]:
    policies = list(REMAT)
    costs = {"dots": "the backward pass repeats all but projections", "full": "the backward pass repeats every layer"}
    later = policies[policies.index(plan.config.model.remat) + 1 :]
    return [Change((f"model.remat={name}",), costs[name], ("update",)) for name in later]


def _smaller_parts(plan: Plan) -> list[Change]:
    """Micro-batches of fewer prompts: half as many, and the fewest that still give every device a prompt."""
    rollout, training = plan.config.rollout, plan.config.training
    if training.tokens_per_micro_batch:
        key, sizes = "tokens_per_micro_batch", [training.tokens_per_micro_batch // part for part in (2, 4)]
    else:
        key, now = "micro_batch_prompts", plan.config.prompts_per_micro_batch()
        shards = plan.mesh.shape["data"] * plan.mesh.shape["fsdp"]
        whole = [size for size in range(now - 1, 0, -1) if rollout.prompts_per_step % size == 0]
        even = [size for size in whole if size % shards == 0]
        sizes = dict.fromkeys((*even[:1], *even[-1:]))
    cost = "a batch is cut into more parts, and weights travel for each"
    return [Change((f"training.{key}={size}",), cost, ("update",)) for size in sizes]


def _shorter_cache(plan: Plan) -> list[Change]:
    tokens = plan.config.rollout.max_completion_tokens // 2
    overrides = (f"rollout.max_completion_tokens={tokens}",)
    return [Change(overrides, "completions end earlier, which is another experiment", PROGRAMS)] if tokens else []
