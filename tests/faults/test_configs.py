"""The campaign of configs, as `python -m tests.faults.configs` runs it."""

import pytest

from tests.faults import configs

pytestmark = pytest.mark.campaign


def test_hostile_values_are_refused_with_their_key_or_taken(capsys):
    assert configs.main(150, seed=0) == 0, capsys.readouterr().out
