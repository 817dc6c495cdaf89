"""A bounded part of the campaign of faults; `python -m tests.faults` is the whole of it."""

import pytest

from tests.faults import damage, others
from tests.faults.kills import MODES, kills
from tests.faults.live import kills_of_both
from tests.faults.outcomes import Outcome, table
from tests.faults.runs import place_in

pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return place_in(tmp_path_factory.mktemp("faults") / "place")


@pytest.fixture(scope="module")
def counting_place(tmp_path_factory):
    """A place of runs that compute nothing, for faults of files and processes alone."""
    return place_in(tmp_path_factory.mktemp("faults") / "counting", counts=True)


@pytest.fixture(scope="module")
def made(place):
    return damage.subject(place)


@pytest.fixture(scope="module")
def expected(counting_place):
    return others.straight(counting_place)


def require_none_wrong(outcomes):
    found = list(outcomes)
    assert found and not [outcome for outcome in found if outcome.result == "NOT"], table(found)


def test_kills_during_the_warm_start_and_after(place):
    require_none_wrong(kills(place, 3, seed=1, modes={"warm start": MODES["warm start"]}))


def test_kills_of_a_server_and_its_trainer(place):
    require_none_wrong(kills_of_both(place, 2, seed=1))


def test_flipped_bits_and_cut_files(made):
    require_none_wrong(damage.flips(made, 160, seed=1))
    require_none_wrong(damage.cuts(made, 2, seed=1))


def test_damaged_runs_go_on(made):
    require_none_wrong(damage.resumed(made, 3, seed=1))


def test_full_disks(counting_place, expected):
    require_none_wrong(others.full_disks(counting_place, expected, 4, seed=1))


def test_two_processes_and_locks_that_were_left(counting_place, expected):
    require_none_wrong(others.two_processes(counting_place, expected, 2, seed=1))
    require_none_wrong(others.locks_left(counting_place, expected))


def test_clocks_that_go_back(counting_place, expected):
    require_none_wrong(others.clocks(counting_place, expected, 2))


def test_outputs_where_no_run_can_be(counting_place):
    require_none_wrong(others.places(counting_place))


def test_the_table_counts_wrong_results():
    shown = table([Outcome("flip", "noticed"), Outcome("flip", "NOT", "of byte 3"), Outcome("kill", "as without")])
    assert [line.split() for line in shown.splitlines()][1:4] == [
        ["flip", "2", "1", "0", "0", "1"],
        ["kill", "1", "0", "0", "1", "0"],
        ["all", "3", "1", "0", "1", "1"],
    ]
    assert "flip: of byte 3" in shown
