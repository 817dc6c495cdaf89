"""One prompt's completions in one request, and the reward that a client gives."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from recjax.experience.group import recorded_from_text, recorded_to_text
from recjax.models.sampling import Sampling
from recjax.rollout.requests import Sampled


class Served(NamedTuple):
    """Completions of one prompt in one request.

    id: id of their group: the reply's id, plus the prompt's number if the reply has several prompts.
    reply: id of the reply.
    first: index of the first completion among the reply's choices.
    session: session whose turns they are; None: independent completions.
    tokenizer: name of the vocabulary.
    messages: original messages, if the template needed only role and content; else None.
    text: text of the prompt as the model read it.
    texts: text of each completion.
    metadata: other recorded values.
    """

    id: str
    reply: str
    first: int
    session: str | None
    time: datetime
    tokenizer: str
    messages: list[dict[str, str]] | None
    text: str | None
    prompt_tokens: Int[np.ndarray, " time"]
    sampling: Sampling
    sampled: list[Sampled]
    texts: list[str]
    metadata: dict[str, Any]

    @property
    def rows(self) -> list[str]:
        """The ids of the completions as rows of a store, if they are not turns of a session."""
        return [f"{self.reply}/{self.first + place}" for place in range(len(self.texts))]

    def without_prompt(self) -> "Served":
        """A copy without the prompt."""
        return self._replace(messages=None, text=None, prompt_tokens=self.prompt_tokens[:0])

    def to_json(self) -> dict[str, Any]:
        """Converts to a JSON object; `from_json` restores it, with bit-identical log-probs."""
        completions = [
            {
                "text": text,
                "tokens": one.tokens.tolist(),
                "logprobs": one.logprobs.tolist(),
                "versions": one.versions.tolist(),
                "truncated": one.truncated,
                **({"recorded": recorded_to_text([one.recorded])} if one.recorded else {}),
            }
            for text, one in zip(self.texts, self.sampled, strict=True)
        ]
        plain = self._replace(time=self.time.isoformat(), prompt_tokens=self.prompt_tokens.tolist())._asdict()
        del plain["sampled"], plain["texts"]
        return plain | {"sampling": list(self.sampling), "completions": completions}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "Served":
        """Restores an object from the output of `to_json`."""
        values = dict(plain)
        completions = values.pop("completions")
        values |= {
            "time": datetime.fromisoformat(values["time"]),
            "prompt_tokens": np.array(values["prompt_tokens"], np.int32),
            "sampling": Sampling(*values["sampling"]),
            "texts": [one["text"] for one in completions],
            "sampled": [
                Sampled(
                    np.array(one["tokens"], np.int32),
                    np.array(one["logprobs"], np.float32),
                    np.array(one["versions"], np.int32),
                    one["truncated"],
                    *recorded_from_text(one.get("recorded")),
                )
                for one in completions
            ],
        }
        return cls(**values)


class Feedback(NamedTuple):
    """A client's reward, its named parts, the correctness of the answer, the turns' rewards, and a comment."""

    reward: float | None
    reward_parts: dict[str, float] | None = None
    accurate: bool | None = None
    turn_rewards: list[float] | None = None
    comment: str | None = None
