"""The decode loop in plain torch: static cache, each prompt run once, one compiled step."""

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.workers.torch_grpo import drawn_tokens
from benchmarks.workers.torch_llama import Sizes, prompt_keys_values, run, scores, sdpa

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
    hidden, kept = prompt_keys_values(sizes, weights, prompts)
    before = 0 if shared else prompts.shape[1]

    def rows_of(x: Tensor) -> Tensor:
        static = x.new_zeros(len(prompts) * group, x.shape[1], before + max_tokens, x.shape[3])
        static[:, :, :before] = x.repeat_interleave(group, 0)[:, :, :before]
        return static

    rows = [tuple(map(rows_of, pair)) for pair in kept]
    return Cache(kept if shared else [], rows), scores(weights, hidden[:, -1])


def decode_step(
    sizes: Sizes, weights: dict[str, Tensor], cache: Cache, last: Tensor, place: Tensor, before: int, length: int,
    greedy: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Draws each row's next token.

    Args:
        last: the rows' newest tokens, not yet in the cache.
        place: [1], where they go in `cache.rows`.
        before: tokens of the prompt that are not in `cache.rows`.
        length: the part of `cache.rows` that is attended to.
    """
    seen = torch.arange(length, device=last.device) <= place

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for held, new in zip(cache.rows[layer], (k, v), strict=True):
            held.index_copy_(2, place, new)
        keys, values = (held[:, :, :length] for held in cache.rows[layer])
        if not cache.prompts:
            return sdpa(q, keys, values, seen[None])
        return _with_shared_prompts(q, cache.prompts[layer], keys, values, seen)

    hidden = run(sizes, weights, last[:, None], place + before, attend)
    return drawn_tokens(scores(weights, hidden[:, 0]), greedy)


def _with_shared_prompts(q: Tensor, prompts: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, seen: Tensor):
    """Attention of one query a row to its prompt, read once for the whole group, and to its own tokens."""
    batch, heads, _, width = q.shape
    count, kv_heads, before, _ = prompts[0].shape
    own = q.view(batch, kv_heads, heads // kv_heads, width) * width**-0.5
    grouped = own.view(count, -1, kv_heads, heads // kv_heads, width).transpose(1, 2).flatten(2, 3)
    theirs = (grouped @ prompts[0].mT).view(count, kv_heads, -1, heads // kv_heads, before)
    theirs = theirs.transpose(1, 2).reshape(batch, kv_heads, -1, before)
    mine = (own @ keys.mT).masked_fill(~seen, float("-inf"))
    weights = torch.cat([theirs, mine], -1).float().softmax(-1).to(q.dtype)
    theirs, mine = weights.split([before, keys.shape[2]], -1)
    grouped = theirs.view(count, -1, kv_heads, heads // kv_heads, before).transpose(1, 2).flatten(2, 3)
    read = (grouped @ prompts[1]).view(count, kv_heads, -1, heads // kv_heads, width)
    return (read.transpose(1, 2).reshape(own.shape) + mine @ values).reshape(batch, heads, 1, width)


@torch.no_grad()
def generate(
    sizes: Sizes, weights: dict[str, Tensor], prompts: Tensor, group: int, max_tokens: int, stop_ids: list[int],
    shared: bool, step=decode_step, greedy: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Tokens, their log-probabilities and their mask, each [batch, max_tokens]; ends when every row has.

    Args:
        step: `decode_step`, or what compiling made of it.
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
