"""The mathematical graders on tables of answers with verdicts; and how math-verify alone does on the first table.

`math_cases.tsv` is graded by `math`. `math_kinds.tsv` names each row's grader and kind. `math_truths.txt` has one truth
a line, of which no digit may be changed.

`python -m tests.tasks.test_math_cases` prints both graders' errors.
"""

import re
import time
from pathlib import Path

import math_verify
import pytest

from recjax.tasks.grading.math_answers import guru_math, math
from tests.marks import campaign
from tests.tasks.reward_cases import BOX

TABLE, KINDS, TRUTHS = (
    Path(__file__).with_name(name) for name in ("math_cases.tsv", "math_kinds.tsv", "math_truths.txt")
)


PARTS = [0, *campaign(*range(1, 8))]


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


@pytest.mark.parametrize("part", PARTS)
def test_no_verdict_of_the_kinds_is_wrong(part):
    rows = [line.split("\t") for line in KINDS.read_text(encoding="utf-8").splitlines()[1:]]
    assert len(rows) > 1500 and len({(row[0], row[1], row[3]) for row in rows}) == len(rows)
    rows.sort(key=lambda row: row[4])
    firsts = [one for one, before in zip(rows, [None, *rows], strict=False) if before is None or one[4] != before[4]]
    graders = {"math": math, "guru_math": guru_math}
    graded = rows[part::8] + firsts * (part == 0)
    assert part or {row[4] for row in graded} == {row[4] for row in rows}, "the quick part has every kind"
    wrong = [row for row in graded if graders[row[3]](BOX % row[1], row[0], {})["accuracy"] != int(row[2])]
    assert wrong == []


@pytest.mark.parametrize("part", PARTS)
def test_no_truth_is_equal_to_itself_with_one_digit_changed(part):
    truths = TRUTHS.read_text(encoding="utf-8").splitlines()
    assert len({*truths}) == len(truths) >= 300
    accepted = []
    for truth in truths[part::8]:
        assert guru_math(BOX % f" {truth} ", truth, {})["accuracy"] == 1
        digits = list(re.finditer(r"\d", truth))
        for place, match in enumerate(digits[:1] + digits[1:][-1:]):
            digit = (int(match.group()) + 1 + (place + len(truth)) % 8) % 10
            changed = f"{truth[: match.start()]}{digit}{truth[match.end() :]}"
            accepted += [(truth, changed)] * int(guru_math(BOX % changed, truth, {})["accuracy"])
    assert accepted == []


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        (r"7^{7^{7^{7}}}", 0.5),
        (r"(10^7)!", 0.5),
        (r"(5\cdot10^4)!+1", 2),
        (r"2^{10^{11}}+3^{10^{11}}", 0.5),
        (r"\binom{10^6}{5\cdot10^5}+1", 0.5),
        (r"\prod_{k=1}^{3000} k^{3000}", 8),
        (r"\sum_{i=1}^{2000}\sum_{j=1}^{2000} \frac{1}{i+j}", 2),
        (r"x^5-3x^4+2x^3-x+1>0", 2),
        (r"\frac{x^3-2x+1}{x^4-5x+3}>0", 2),
        (r"x^2+y^2=(x+y+z)^{12}", 2),
        (r"\sin x+\cos y=\sqrt{x}+\ln y+e^{x}", 2),
        (r"\int_0^1\int_0^1 xy dx dy", 2),
        (r"\tan(\tan(\tan(10^{1000})))", 0.5),
    ],
)
def test_no_answer_takes_long(answer, seconds):
    started = time.process_time()
    for truth in (r"\sqrt{2}", "x>1", "x^2+y^2=1", "x^2+1"):
        assert guru_math(BOX % answer, truth, {})["accuracy"] == 0
    assert time.process_time() - started < seconds


def test_the_table_is_what_the_documents_say():
    text = Path("experiments/math/README.md").read_text(encoding="utf-8")
    assert int(re.search(r"holds ([\d,]+) more", text)[1].replace(",", "")) == len(KINDS.read_text().splitlines()) - 1
    assert int(re.search(r"holds ([\d,]+) true", text)[1]) == len(TRUTHS.read_text().splitlines())
    rows = cases()
    assert len(rows) >= 600 and len({row[0] for row in rows}) >= 15
    assert len({row[1:3] for row in rows}) == len(rows), "no case stands there twice"
    assert all(len(row[4]) > 2 and row[3] in (0, 1) for row in rows)
    stated = re.search(r"([\d,]+) answers in \d+ sections", text)
    assert int(stated[1].replace(",", "")) == len(rows)


@pytest.mark.campaign
def test_math_verify_alone_errs_as_often_as_the_documents_say():
    wrong = errors(theirs)
    text = Path("experiments/math/README.md").read_text(encoding="utf-8")
    stated = re.search(r"called (\d+) wrong answers right and (\d+) right", text)
    assert (sum(row[3] == 0 for row in wrong), sum(row[3] == 1 for row in wrong)) == tuple(map(int, stated.groups()))


if __name__ == "__main__":
    for name, grader in (("recjax", ours), ("math-verify", theirs)):
        found = errors(grader)
        kind = {verdict: sum(row[3] == verdict for row in found) for verdict in (0, 1)}
        print(f"{name}: {len(found)} of {len(cases())}: {kind[0]} wrong answers called right, {kind[1]} the reverse")
