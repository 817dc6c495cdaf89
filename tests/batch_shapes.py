"""The shape of batches that any groups fit into."""

from collections.abc import Sequence

from recjax.experience.batch import Shape
from recjax.experience.group import Group


def shape_of(groups: Sequence[Group], prompts: int) -> Shape:
    """The shape of batches of `prompts` groups into which any of these fit, so that one compiled update serves all."""
    return Shape(
        prompts,
        max(len(group.completions) for group in groups),
        max(len(group.prompt_tokens) for group in groups),
        max(len(row.tokens) for group in groups for one in group.completions for row in one.rows),
    )
