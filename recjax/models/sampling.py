"""The distribution that completions are sampled from."""

from typing import NamedTuple


class Sampling(NamedTuple):
    """The distribution softmax(logits / temperature), cut to `top_k` tokens (0 = all) and to mass `top_p`.

    Temperature 0 means the most likely token, sampled with probability one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
