"""The distribution that completions are sampled from."""

from typing import NamedTuple


class Sampling(NamedTuple):
    """How tokens are sampled: softmax(logits / temperature), cut to the most likely tokens by three rules at once.

    top_k: that many tokens; 0: all.
    top_p: as few tokens as have this share of the probability that `top_k` leaves; 1: all.
    min_p: tokens at least this share as likely as the most likely one; 0: all.

    Temperature 0 means the most likely token, sampled with probability one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
