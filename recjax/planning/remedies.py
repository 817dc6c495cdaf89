"""Changes of the config that may make a run fit its devices, the cheapest first."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from recjax.models.decoder import REMAT
from recjax.planning.ahead import PROGRAMS, Plan, micro_batches_of


class Change(NamedTuple):
    """Overrides of the config, their cost in words, and the programs that they change."""

    overrides: tuple[str, ...]
    cost: str
    programs: tuple[str, ...]


def changes(plan: Plan, too_large: set[str]) -> Iterator[Change]:
    """Changes that may make programs fit, the cheapest first: one by one, then together.

    Args:
        too_large: names of programs, out of `recjax.planning.ahead.PROGRAMS`.
    """
    policies, now, tokens = list(REMAT), plan.config.model.remat, plan.config.rollout.max_completion_tokens // 2
    costs = {"dots": "the backward pass repeats all but projections", "full": "the backward pass repeats every layer"}
    later = policies[policies.index(now) + 1 :]
    shorter = (f"rollout.max_completion_tokens={tokens}",), "completions end earlier, which is another experiment"
    kinds = (
        _more_fsdp(plan),
        [Change((f"model.remat={name}",), costs[name], ("update",)) for name in later],
        _smaller_parts(plan),
        [Change(*shorter, PROGRAMS)] if tokens else [],
    )
    strongest = [kind[-1] for kind in kinds if kind]
    together = [strongest[:number] for number in range(2, len(strongest) + 1)]
    for change in (*itertools.chain(*kinds), *map(_combined, together)):
        if too_large <= {*change.programs}:
            yield change


def _combined(parts: list[Change]) -> Change:
    overrides, costs, programs = zip(*parts, strict=True)
    named = tuple(name for name in PROGRAMS if name in itertools.chain(*programs))
    return Change(tuple(itertools.chain(*overrides)), "; ".join(costs), named)


def _more_fsdp(plan: Plan) -> list[Change]:
    """Meshes with more and more devices moved from the data axis to fsdp."""
    data, fsdp = plan.mesh.shape["data"], plan.mesh.shape["fsdp"]
    factors = [factor for factor in range(2, data + 1) if data % factor == 0]
    overrides = [(f"mesh.data={data // factor}", f"mesh.fsdp={fsdp * factor}") for factor in factors]
    return [Change(each, "weights travel between more devices", PROGRAMS) for each in overrides]


def _smaller_parts(plan: Plan) -> list[Change]:
    """Micro-batches with fewer prompts: half as many, and the fewest that give every device a prompt."""
    rollout, training = plan.config.rollout, plan.config.training
    if training.tokens_per_micro_batch:
        key, sizes = "tokens_per_micro_batch", [training.tokens_per_micro_batch // part for part in (2, 4)]
    else:
        key, now = "micro_batch_prompts", rollout.prompts_per_step // micro_batches_of(plan)
        shards = plan.mesh.shape["data"] * plan.mesh.shape["fsdp"]
        whole = [size for size in range(now - 1, 0, -1) if rollout.prompts_per_step % size == 0]
        even = [size for size in whole if size % shards == 0]
        sizes = dict.fromkeys((*even[:1], *even[-1:]))
    cost = "a batch is cut into more parts, and weights travel for each"
    return [Change((f"training.{key}={size}",), cost, ("update",)) for size in sizes]
