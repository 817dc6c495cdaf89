"""The example of a supervised stage and a reward model, small."""

import pytest

from experiments.day.demonstrations import show

pytestmark = pytest.mark.campaign


def test_the_chats_are_learned_and_the_score_rises(tmp_path):
    losses, scores = show(tmp_path / "day", shown_steps=40, steps=10)
    assert losses[-1] < losses[0] - 0.5 and scores[-1] > scores[0]
