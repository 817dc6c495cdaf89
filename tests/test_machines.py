"""Numeric tests pass as other machines round."""

import numpy as np
import pytest

from tests import machines


def compares(found):
    np.testing.assert_allclose(found, 1.0)


def counts():
    assert len([1]) == 1


def test_a_test_is_numeric_where_a_helper_compares():
    assert machines.is_numeric(compares) and machines.is_numeric(lambda: compares(1.0))
    assert not machines.is_numeric(counts)


def test_moved_numbers_differ_by_one_last_unit():
    x = np.array([0.0, 1.5, -2.5, 0.3, 7.0])
    change = machines.moved(x) - x.astype(np.float32)
    np.testing.assert_array_equal(np.sign(change), [0, -1, 1, -1, 1])
    np.testing.assert_array_equal(np.abs(change)[1:], np.spacing(np.abs(x[1:]).astype(np.float32)))
    assert machines.moved(np.arange(3)).tolist() == [0, 1, 2]


@pytest.mark.campaign
@pytest.mark.parametrize("name", machines.SETTINGS)
def test_numeric_tests_pass_in_every_setting(name, tmp_path):
    if not machines.is_possible(name):
        pytest.skip(f"this CPU has no {machines.SETTINGS[name].needs}")
    result = machines.result_of(name, tmp_path, ["-m", machines.QUICK, *machines.FOLDERS])
    assert result.passed > 600 and result.failed == 0, "\n".join(result.lines)
