"""The mathematical grader on a table of answers with verdicts; and how math-verify alone does on the same table.

`python -m tests.tasks.test_math_cases` prints both graders' errors.
"""

import re
from pathlib import Path

import math_verify
import pytest

from recjax.tasks.grading.math_answers import math
from tests.tasks.reward_cases import BOX

TABLE = Path(__file__).with_name("math_cases.tsv")


def cases():
    """(section, truth, answer, verdict, reason) of every row; a line that begins with # names a section."""
    section, rows = "", []
    for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]:
        if line.startswith("# "):
            section = line[2:]
        else:
            truth, answer, verdict, reason = line.split("\t")
            rows.append((section, truth, answer, int(verdict), reason))
    return rows


def ours(truth, answer):
    """The verdict of the package's grader."""
    return int(math(BOX % answer, truth, {})["accuracy"])


def theirs(truth, answer):
    """The verdict of math-verify, used as its README shows."""
    gold = math_verify.parse(f"${truth}$", parsing_timeout=None)
    return int(math_verify.verify(gold, math_verify.parse(BOX % answer, parsing_timeout=None), timeout_seconds=None))


def errors(grader):
    """Rows whose verdict a grader gets wrong."""
    return [row for row in cases() if grader(*row[1:3]) != row[3]]


def test_no_verdict_of_the_table_is_wrong():
    assert errors(ours) == []


def test_the_table_is_what_the_documents_say():
    rows = cases()
    assert len(rows) >= 600 and len({row[0] for row in rows}) >= 15
    assert len({row[1:3] for row in rows}) == len(rows), "no case stands there twice"
    assert all(len(row[4]) > 2 and row[3] in (0, 1) for row in rows)
    stated = re.search(r"([\d,]+) answers in \d+ sections", Path("docs/rewards.md").read_text(encoding="utf-8"))
    assert int(stated[1].replace(",", "")) == len(rows)


@pytest.mark.slow
def test_math_verify_alone_errs_as_often_as_the_documents_say():
    wrong = errors(theirs)
    stated = re.search(r"called (\d+) wrong answers right and (\d+) right", Path("docs/rewards.md").read_text())
    assert (sum(row[3] == 0 for row in wrong), sum(row[3] == 1 for row in wrong)) == tuple(map(int, stated.groups()))


if __name__ == "__main__":
    for name, grader in (("recjax", ours), ("math-verify", theirs)):
        found = errors(grader)
        kind = {verdict: sum(row[3] == verdict for row in found) for verdict in (0, 1)}
        print(f"{name}: {len(found)} of {len(cases())}: {kind[0]} wrong answers called right, {kind[1]} the reverse")
