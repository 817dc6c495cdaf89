"""The decode loop in plain torch: static cache, each prompt run once, one compiled step."""

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.workers.torch_grpo import drawn_tokens
from benchmarks.workers.torch_llama import Sizes, block, run, scores, sdpa

BUCKET = 64  # tokens by which the part of the cache that is attended to grows


class Cache(NamedTuple):
    """Keys and values, one tensor a layer.

    prompts: [prompts, kv_heads, prompt_time, head_dim], or empty where each row holds its prompt in `rows` itself.
    rows: [batch, kv_heads, time, head_dim].
    """

    prompts: list[tuple[Tensor, Tensor]]
    rows: list[tuple[Tensor, Tensor]]


def prefill(
    sizes: Sizes, weights: dict[str, Tensor], prompts: Tensor, group: int, max_tokens: int, shared: bool
) -> tuple[Cache, Tensor]:
    """The cache of a batch's rows, and the scores of their first tokens, [prompts, vocabulary]."""
    positions = torch.arange(prompts.shape[1], device=prompts.device)
    hidden, kept = run(sizes, weights, prompts, positions, sdpa)
    before = 0 if shared else prompts.shape[1]

    def rows_of(x: Tensor) -> Tensor:
        static = x.new_zeros(len(prompts) * group, x.shape[1], before + max_tokens, x.shape[3])
        static[:, :, :before] = x.repeat_interleave(group, 0)[:, :, :before]
        return static

    rows = [tuple(map(rows_of, pair)) for pair in kept]
    return Cache(kept if shared else [], rows), scores(weights, hidden[:, -1])


def decode_step(
    sizes: Sizes, weights: dict[str, Tensor], cache: Cache, last: Tensor, place: Tensor, before: int, length: int,
    greedy: bool, block=block, draw=drawn_tokens,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Draws each row's next token.

    Args:
        last: the rows' newest tokens, not yet in the cache.
        place: [1], where they go in `cache.rows`.
        before: tokens of the prompt that are not in `cache.rows`.
        length: the part of `cache.rows` that is attended to.
        block, draw: these functions, or their compiled forms.
    """
    seen = torch.arange(length, device=last.device) <= place
    contexts = [(place, seen, *pair) for pair in cache.rows]
    if cache.prompts:
        contexts = [(*context, *pair) for context, pair in zip(contexts, cache.prompts, strict=True)]
    attend = _to_shared_prompts if cache.prompts else _to_own_prompts
    hidden, _ = run(sizes, weights, last[:, None], place + before, attend, contexts, block)
    return draw(scores(weights, hidden[:, 0]), greedy)


def _put(k: Tensor, v: Tensor, place: Tensor, length: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The part of the cache that is attended to, with new keys and values in it."""
    for held, new in ((keys, k), (values, v)):
        held.index_copy_(2, place, new)
    return keys[:, :, :length], values[:, :, :length]


def _to_own_prompts(q: Tensor, k: Tensor, v: Tensor, place: Tensor, seen: Tensor, *cache: Tensor) -> Tensor:
    """Attention of one query a row to the row's cache."""
    return sdpa(q, *_put(k, v, place, len(seen), *cache), seen[None])


def _to_shared_prompts(
    q: Tensor, k: Tensor, v: Tensor, place: Tensor, seen: Tensor, keys: Tensor, values: Tensor,
    prompt_keys: Tensor, prompt_values: Tensor,
) -> Tensor:  # fmt: skip
    """Attention of one query a row to its prompt, read once for the whole group, and to its own tokens."""
    keys, values = _put(k, v, place, len(seen), keys, values)
    batch, heads, _, width = q.shape
    count, kv_heads, before, _ = prompt_keys.shape
    own = q.view(batch, kv_heads, heads // kv_heads, width) * width**-0.5

    def by_prompt(x: Tensor) -> Tensor:
        return x.reshape(count, -1, *x.shape[1:]).transpose(1, 2).flatten(2, 3)

    def by_row(x: Tensor) -> Tensor:
        x = x.view(count, kv_heads, -1, heads // kv_heads, x.shape[-1])
        return x.transpose(1, 2).reshape(batch, kv_heads, heads // kv_heads, x.shape[-1])

    theirs = by_row(by_prompt(own) @ prompt_keys.mT)
    mine = (own @ keys.mT).masked_fill(~seen, float("-inf"))
    weights = torch.cat([theirs, mine], -1).float().softmax(-1).to(q.dtype)
    theirs, mine = weights.split([before, keys.shape[2]], -1)
    return (by_row(by_prompt(theirs) @ prompt_values) + mine @ values).reshape(batch, heads, 1, width)


@torch.no_grad()
def generate(
    sizes: Sizes, weights: dict[str, Tensor], prompts: Tensor, group: int, max_tokens: int, stop_ids: list[int],
    shared: bool, step=decode_step, greedy: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Tokens, their log-probabilities and their mask, each [batch, max_tokens]; ends when every row has.

    Args:
        step: `decode_step`, or its compiled form.
    """
    cache, first = prefill(sizes, weights, prompts, group, max_tokens, shared)
    before = prompts.shape[1] if shared else 0
    start = prompts.shape[1] - before
    stops = torch.tensor(stop_ids, device=prompts.device)
    last, logprobs = drawn_tokens(first.repeat_interleave(group, 0), greedy)
    ended = torch.zeros_like(last, dtype=torch.bool)
    drawn, place = [], torch.tensor([start], device=prompts.device)
    for time in range(max_tokens):
        drawn.append((last, logprobs, ~ended))
        ended = ended | torch.isin(last, stops)
        # A GPU would wait for the host at each look.
        looks = last.device.type == "cpu" or time % 16 == 15
        if time == max_tokens - 1 or (looks and bool(ended.all())):
            break
        length = start + min(BUCKET * (time // BUCKET + 1), max_tokens)
        last, logprobs = step(sizes, weights, cache, last, place, before, length, greedy)
        place = place + 1
    rows = [torch.stack(column, 1) for column in zip(*drawn, strict=True)]
    missing = max_tokens - len(drawn)
    tokens, logprobs, mask = (torch.nn.functional.pad(column, (0, missing)) for column in rows)
    return tokens * mask, logprobs * mask, mask
