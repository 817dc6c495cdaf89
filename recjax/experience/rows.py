"""A drawn batch as rows of a store."""

from collections.abc import Sequence
from datetime import datetime

from recjax.experience.records import Batch
from recjax.experience.store import Experience
from recjax.models.logprobs import Sampling
from recjax.rollout.prompts import Prompts


def rows_of_batch(
    batch: Batch,
    texts: Sequence[str],
    prompts: Prompts,
    *,
    name: str,
    source: str,
    tokenizer: str,
    sampling: Sampling,
    time: datetime,
) -> list[Experience]:
    """One row a completion, in the batch's order.

    Args:
        texts: of the completions, without the tokens that ended them.
        prompts: those of the batch.
        name: of this batch, given to no other; ids of its rows and groups begin with it.
        tokenizer: of the vocabulary; see `tokenise.tokenizer_name`.
        sampling: what drew the batch.
    """
    per_prompt = len(texts) // len(prompts.texts)
    rows = []
    for place, text in enumerate(texts):
        mask, asked = batch.completion_mask[place], prompts.problems[place // per_prompt]
        chat = not isinstance(asked.prompt, str)
        parts = {part: float(values[place]) for part, values in batch.reward_parts.items()}
        rows.append(
            Experience(
                id=f"{name}/{place:05d}",
                group_id=f"{name}/{batch.group_ids[place]:05d}",
                source=source,
                completion=text,
                time=time,
                prompt=None if chat else asked.prompt,
                messages=list(asked.prompt) if chat else None,
                answer=asked.answer,
                tokenizer=tokenizer,
                prompt_tokens=prompts.tokens[place // per_prompt][prompts.mask[place // per_prompt]],
                completion_tokens=batch.completions[place][mask],
                completion_mask=mask[mask],
                behaviour_logprobs=batch.behaviour_logprobs[place][mask],
                reward=float(batch.rewards[place]),
                reward_parts=parts or None,
                accurate=bool(batch.accurate[place]),
                truncated=bool(batch.truncated[place]),
                policy_version=int(batch.policy_version[place]),
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
            )
        )
    return rows
