"""What the inspection says is what is there."""

import pytest

from recjax.experience.records import groups_of
from recjax.inspect_experience import chosen_records, print_summary, summary
from recjax.plots.store import by_source, draw_store
from recjax.runtime.console import plain_console
from tests.experience.rows import append, make_row, read, text_row
from tests.marks import slow

# Group 0: whole, with signal, of two sources; 1: whole, no signal; 2: a row is pending, and the others differ.
ROWS = [
    make_row(0, group=0, reward=0.0, length=1, truncated=True, policy_version=3),
    make_row(1, group=0, reward=1.0, length=5, policy_version=7),
    *(make_row(i, group=1, reward=0.5) for i in (3, 4, 5)),
    *(make_row(i, group=2, reward=reward, reward_parts=None) for i, reward in ((6, 0.0), (7, 1.0), (8, None))),
    text_row(9, group=0, reward=1.0),
]


def test_numbers_of_a_store_done_by_hand():
    assert summary(ROWS) == {
        "rows": "9",
        "groups": "3",
        "group size": "3",
        "pending rows": "1",
        "groups with a pending row": "1",
        "whole groups with signal": "1 of 2",
        "groups of several sources": "1",
        "reward": "0.562 (0 to 1)",
        "accurate": "0.571",
        "policy versions": "0 to 7",
        "rows of other models": "1",
        "with behavior log-probs": "8",
        "tokenized": "8",
        "completion tokens": "3.0 (1 to 5)",
        "truncated": "0.111",
    }


def test_parts_of_a_store_add_up():
    for name in ("rows", "pending rows", "with behavior log-probs", "tokenized", "rows of other models"):
        assert sum(int(summary(rows)[name]) for rows in by_source(ROWS).values()) == int(summary(ROWS)[name])
    assert sum(len(group.completions) for group in groups_of(ROWS)) == len(ROWS)
    assert summary([ROWS[7]])["reward"] == "none yet"
    assert summary([ROWS[8]])["completion tokens"] == summary([ROWS[8]])["accurate"] == "not known"


def test_samples_follow_from_the_seed():
    def chosen(count, seed):
        return [record.completion.id for record in chosen_records(ROWS, count, seed)]

    assert chosen(4, 0) == chosen(4, 0) != chosen(4, 1)
    assert chosen(99, 0) == [record.completion.id for record in ROWS]
    assert len({*chosen(4, 0)}) == 4


CHAT = text_row(9, prompt=None, messages=[{"role": "user", "content": "[bold]2+2?"}], reward=None)
STORES = [ROWS, [CHAT], ROWS[3:4]]


def test_it_is_shown_whatever_is_missing(tmp_path):
    for number, rows in enumerate(STORES):
        append(tmp_path / str(number), rows)
        rows = read(tmp_path / str(number))
        console = plain_console(record=True, width=200)
        print_summary(rows, rows, console)
        text = console.export_text()
        for row in rows:
            asked, one = row.group.prompt, row.completion
            asked = asked if isinstance(asked, str) else asked[0]["content"]
            assert all(said in text for said in (one.id, repr(one.text), asked))


@pytest.mark.parametrize("rows", STORES[:1] + slow(*STORES[1:]), ids=["rows", "a chat", "one row"])
def test_it_is_drawn_whatever_is_missing(tmp_path, rows):
    append(tmp_path / "store", rows)
    draw_store(read(tmp_path / "store"), "a store", tmp_path / "figures" / "store.png")
    assert (tmp_path / "figures" / "store.png").read_bytes()[:4] == b"\x89PNG"
