"""Shared code of the torch workers: GRPO's loss and step, drawing, grading, checkpoints, the device's peaks."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

from benchmarks.reward import vowel_share
from benchmarks.workers.protocol import Inputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LEARNING_RATE, CLIP_NORM, CLIP_RANGE = 1e-6, 1.0, 0.2
CHUNK_SCORES = 1 << 28  # vocabulary scores that exist at the same time


def peak_device_bytes() -> int | None:
    """Most memory of the GPU that tensors had since the last call."""
    if DEVICE.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def synchronize() -> None:
    """Waits for the GPU, if there is one."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def prompt_tokens(inputs: Inputs) -> Tensor:
    """The prompts' ids on the device, [prompts, time]."""
    return torch.tensor(inputs.prompts, dtype=torch.long, device=DEVICE)


def drawn_tokens(scores: Tensor, greedy: bool = False) -> tuple[Tensor, Tensor]:
    """One token a row from softmax(scores), and its log-probability; the most likely one where greedy.

    argmax p/e with exponential e draws from p; it has no host synchronization, unlike torch.multinomial.
    """
    scores = scores.float()
    probabilities = scores.softmax(-1)
    noise = 1.0 if greedy else torch.empty_like(probabilities).exponential_(1.0)
    tokens = (probabilities / noise).argmax(-1)
    return tokens, -F.cross_entropy(scores, tokens, reduction="none")


def token_logprobs(score: Callable[[Tensor], Tensor], hidden: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
    """Log-probabilities [rows, time] of tokens; in chunks that the backward pass recomputes where scores are many."""
    flat, wanted = hidden.flatten(0, 1), tokens.flatten()

    def one(part: Tensor, of: Tensor) -> Tensor:
        return -F.cross_entropy(score(part).float(), of, reduction="none")

    rows = max(CHUNK_SCORES // vocabulary, 1)
    if len(flat) <= rows:
        return one(flat, wanted).view(tokens.shape)
    pieces = zip(flat.split(rows), wanted.split(rows), strict=True)
    return torch.cat([torch.utils.checkpoint.checkpoint(one, *piece, use_reentrant=False) for piece in pieces]).view(
        tokens.shape
    )


def advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Rewards in standard deviations over their group's mean."""
    grouped = rewards.view(-1, group_size)
    centered = grouped - grouped.mean(1, keepdim=True)
    return (centered / (centered.square().mean(1, keepdim=True).sqrt() + 1e-6)).flatten()


def grpo_loss(logprobs: Tensor, behavior: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """Sum over tokens of the clipped surrogate; the caller divides by the batch's number of tokens."""
    ratio = (logprobs - behavior).exp()
    clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
    gains = torch.minimum(ratio * advantage[:, None], clipped * advantage[:, None])
    return -(gains * mask).sum()


def weighted_log_likelihood(logprobs: Tensor, behavior: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """recjax's form of it, of the same gradient: log-probabilities weighted by ratio and advantage, none clipped."""
    ratio = (logprobs - behavior).exp().detach()
    rising = advantage[:, None] >= 0
    kept = torch.where(rising, ratio <= 1 + CLIP_RANGE, ratio >= 1 - CLIP_RANGE)
    return -(logprobs * ratio * advantage[:, None] * kept * mask).sum()


def optimizer_of(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """AdamW in torch's fused form."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)


def accumulate(
    logprobs_of: Callable[[Tensor, Tensor], Tensor],
    inputs: Inputs,
    prompts: Tensor,
    completions: Tensor,
    mask: Tensor,
    behavior: Tensor | None,
    rewards: Tensor,
    loss_of: Callable = grpo_loss,
) -> Tensor:
    """Adds the gradients of all micro-batches and returns the loss.

    Args:
        logprobs_of: (prompts, completions) of a micro-batch → log-probabilities.
        behavior: None: the policy that is trained drew the batch, whose log-probabilities then are the same ones.
        loss_of: of the loss's forms.
    """
    parts, group_size = inputs.shape["micro_batches"], inputs.shape["group_size"]
    advantage, count, total = advantages(rewards, group_size), mask.sum(), 0.0
    columns = [completions, mask, advantage, *([] if behavior is None else [behavior])]
    for part in zip(prompts.chunk(parts), *(column.chunk(parts) for column in columns), strict=True):
        logprobs = logprobs_of(part[0], part[1])
        old = logprobs.detach() if behavior is None else part[4]
        loss = loss_of(logprobs, old, part[3], part[2]) / count
        loss.backward()
        total += loss.detach()
    return total


def apply(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> Tensor:
    """One optimizer step; returns the gradient's norm before clipping."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def compared_loss(inputs: Inputs, parameters: list[Tensor], logprobs_of: Callable, file: str) -> dict[str, float]:
    """Loss and gradient norm of the batch that all systems compare; changes no parameter."""
    batch = (inputs.completions.astype(np.int64), np.ones_like(inputs.noise), np.load(file), inputs.rewards)
    batch = [torch.tensor(column, device=DEVICE) for column in batch]
    found = {}
    for name, loss_of in [("loss", weighted_log_likelihood), ("surrogate", grpo_loss)]:
        loss = accumulate(logprobs_of, inputs, prompt_tokens(inputs), *batch, loss_of=loss_of)
        found[name] = loss.item()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        for parameter in parameters:
            parameter.grad = None
    # Of the loss that is trained on.
    return found | {"gradient_norm": norm.item()}


def compared_logprobs(inputs: Inputs, logprobs_of: Callable) -> np.ndarray:
    """Log-probabilities of the same batch, by micro-batches."""
    parts, completions = inputs.shape["micro_batches"], torch.tensor(inputs.completions.astype(np.int64), device=DEVICE)
    pairs = zip(prompt_tokens(inputs).chunk(parts), completions.chunk(parts), strict=True)
    with torch.no_grad():
        return torch.cat([logprobs_of(*pair) for pair in pairs]).float().cpu().numpy()


def save_logprobs(inputs: Inputs, logprobs_of: Callable, file: str) -> None:
    """Writes those log-probabilities for the driver to compare."""
    np.save(file, compared_logprobs(inputs, logprobs_of))


def graded(inputs: Inputs, tokenizer: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    """Rewards of drawn completions, by their text without the token that stopped them."""
    stops = set(inputs.shape["stop_ids"])
    rows = zip(tokens.tolist(), mask.sum(1).tolist(), strict=True)
    texts = tokenizer.batch_decode([[id for id in row[: int(length)] if id not in stops] for row, length in rows])
    prompts = [text for text in inputs.texts for _ in range(inputs.shape["group_size"])]
    return torch.tensor(vowel_share(prompts, texts, texts), device=DEVICE)


def write_checkpoint(inputs: Inputs, state: dict, optimizer: torch.optim.Optimizer) -> dict:
    """Weights and the optimizer's state in one file."""
    torch.save({"model": state, "optimizer": optimizer.state_dict()}, inputs.scratch / "checkpoint.pt")
    return {}


def drawing(inputs: Inputs) -> dict:
    """Seconds of only sampling, as often as a step samples, with log-probabilities and without."""
    vocabulary, rows = inputs.shape["vocabulary"], len(inputs.completions)
    scores = torch.randn(rows, vocabulary, device=DEVICE)

    def alone(stored: bool) -> float:
        synchronize()
        started = time.perf_counter()
        for _ in range(inputs.shape["completion_tokens"]):
            drawn_tokens(scores) if stored else _token(scores)
        synchronize()
        return time.perf_counter() - started

    return {"inside": {"with_logprobs": alone(True), "without_logprobs": alone(False)}}


def _token(scores: Tensor) -> Tensor:
    probabilities = scores.softmax(-1)
    return (probabilities / torch.empty_like(probabilities).exponential_(1.0)).argmax(-1)


def peaks(inputs: Inputs) -> dict[str, float]:
    """The best of five: FLOP/s of a matrix product in the precision, bytes/s of a copy that no cache holds."""
    square = torch.ones(2048, 2048, dtype=getattr(torch, inputs.precision), device=DEVICE)
    long, target = (torch.ones(1 << 27, device=DEVICE) for _ in range(2))

    def best(call: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(6):
            synchronize()
            started = time.perf_counter()
            call()
            synchronize()
            seconds.append(time.perf_counter() - started)
        return min(seconds[1:])

    return {
        "flops": 2 * 2048**3 / best(lambda: square @ square),
        "bytes": 2 * 4 * len(long) / best(lambda: target.copy_(long)),
    }
