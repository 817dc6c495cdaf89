"""The table of features and its array: every pair of values is in a row, or is refused by name."""

import itertools

from recjax.config.schema import KEYS
from tests.faults.seeded import HERE
from tests.faults.seeded import seeded as with_fault
from tests.pairs import covering, relations
from tests.pairs.__main__ import Campaign, Hit
from tests.pairs.covering import PLAIN, named, row_of
from tests.pairs.features import AXES, COSTLY, KNOBS, NEEDS, REFUSED_AT_START
from tests.pairs.relations import RELATIONS
from tests.pairs.seeded import ALL, PAIRS, rows_of, smallest_row


def test_every_pair_is_covered_or_refused_by_name():
    rows = covering.stored_array()
    covered = set(itertools.chain.from_iterable(map(covering.pairs_of, rows)))
    reasons = {pair: covering.refused(covering.row_with(pair)) for pair in covering.all_pairs() if pair not in covered}
    accepted = [sorted(value for _, value in pair) for pair, reason in reasons.items() if reason is None]
    assert not accepted, f"{len(accepted)} pairs are neither covered nor refused; python -m tests.pairs --write"
    # A refusal names a key of the config.
    blocks = {key.split(".")[0] for key in KEYS}
    unnamed = {reason for reason in reasons.values() if reason.split(".")[0].split(" ")[0] not in blocks}
    assert unnamed <= {*REFUSED_AT_START.values()}


def test_every_costly_triple_is_covered_or_refused():
    rows = [{*(PLAIN | row).items()} for row in covering.stored_array()]
    uncovered = [triple for triple in covering.costly_triples() if not any(triple <= row for row in rows)]
    assert all(covering.refused(covering.row_with(triple)) for triple in uncovered)


def test_rows_that_must_be_small_are_there():
    assert covering.smallest_rows(covering.stored_array()) == []


def test_the_schema_accepts_every_row():
    for row in covering.stored_array():
        assert covering.refusal(row) is None, named(row)


def test_no_value_overrides_a_key_of_another_axis():
    for row in covering.stored_array():
        options = [option for option in covering.options_of(row) if not option.endswith("=null")]
        keys = {}
        for option in options:
            key, _, value = option.partition("=")
            assert keys.setdefault(key, value) == value, (named(row), key)


def test_names_are_of_one_value_and_of_the_table():
    values = [value for axis in AXES.values() for value in axis]
    assert len({*values}) == len(values)
    assert {*COSTLY, *KNOBS, *NEEDS} <= {*values}
    for names in itertools.chain.from_iterable(REFUSED_AT_START):
        assert ({names} if isinstance(names, str) else names) <= {*values}
    for row in covering.stored_array():
        assert row_of(named(row)) == row


def test_every_seeded_fault_fits_code_and_array():
    for fault, values, _ in ALL.values():
        with_fault((HERE / fault.file).read_text(), fault)
        assert rows_of(values) or covering.refused(smallest_row(values)), values


def test_every_relation_sees_a_seeded_fault():
    assert {*RELATIONS} == {seeded.relation for seeded in ALL.values()} - {PAIRS, None}


def test_a_broken_relation_is_shown_by_the_smallest_row(tmp_path, monkeypatch):
    class Broken:
        def __init__(self, row, materials, folder):
            self.row = row

        def run(self, name):
            return self.row

    def breaks(case, ran):
        if {"offline", "packed"} <= {*ran.values()}:
            yield "wrong numbers"

    monkeypatch.setattr("tests.pairs.__main__.Case", Broken)
    monkeypatch.setattr(relations, "RELATIONS", {"breaks": breaks})
    campaign = Campaign(None, tmp_path, ["breaks"])
    assert campaign.check(row_of("offline, frozen, entropy")) == []
    (hit,) = campaign.check(row_of("offline, packed, frozen, entropy"))
    assert hit == Hit("breaks", row_of("offline, packed, frozen, entropy"), "wrong numbers")
    smallest = hit._replace(row=campaign.smallest(hit))
    assert smallest.command == 'python -m tests.pairs --row "offline, packed" --only breaks'
    assert campaign.applied == {"runs": 2, "breaks": 2} and campaign.hits == [hit]
