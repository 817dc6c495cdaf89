"""The distribution that completions are sampled from."""

from typing import NamedTuple

KEPT_LOGPROBS = "kept_logprobs"  # name of the log-probs of a set's ids
KEPT = ("kept_ids", "kept_bits")  # names of recorded sets, see `recjax.models.logprobs.kept_tokens`
TOP_IDS = "top_ids"  # name of the recorded most likely tokens, see `recjax.models.logprobs.top_tokens`
TOP_LOGPROBS = "top_logprobs"  # name of their recorded log-probs


class TokenRecord(NamedTuple):
    """The arrays that a sampler records of the distribution of each token.

    kept_ids: largest set of possible tokens to record as ids; see `recjax.models.logprobs.kept_tokens`.
    top_k: number of most likely tokens to record with their log-probs; see `recjax.models.logprobs.top_tokens`.
    kept_logprobs: True to record the log-probs of the sets' ids as well, most likely first.
    """

    kept_ids: int = 0
    top_k: int = 0
    kept_logprobs: bool = False

    def under(self, sampling: "Sampling") -> "TokenRecord":
        """The record without arrays that a distribution does not have.

        Programs have the record as a static option, so equal programs need equal records.
        """
        record = self
        if not sampling.has_cuts:
            record = record._replace(kept_ids=0)
        if not record.kept_ids:
            record = record._replace(kept_logprobs=False)
        if sampling.temperature == 0:
            record = record._replace(top_k=0)
        return record

    def known_tokens(self, sampling: "Sampling") -> int:
        """Largest number of a token's most likely tokens that have a recorded log-prob."""
        record = self.under(sampling)
        if record.top_k or not record.kept_logprobs:
            return record.top_k
        return sampling.largest_set(record.kept_ids)


NOTHING_RECORDED = TokenRecord()


class Sampling(NamedTuple):
    """The distribution softmax(logits / temperature), cut to the most likely tokens by three rules at once.

    top_k: keeps this many tokens; 0: all.
    top_p: keeps as few tokens as have this share of the probability that `top_k` keeps; 1: all.
    min_p: keeps tokens at least this share as likely as the most likely token; 0: all.

    Temperature 0 means the most likely token, sampled with probability one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def largest_set(self, most: int) -> int:
        """Largest set of possible tokens to record, at most `most`."""
        if self.top_k > 0:
            return min(most, 2 * self.top_k)  # twice, because equal scores can enlarge the set of top_k
        return most

    @property
    def has_cuts(self) -> bool:
        """True if some tokens may have probability 0; False at temperature 0, where π is never computed."""
        if self.temperature == 0:
            return False
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0
