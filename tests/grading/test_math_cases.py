"""The mathematical graders on tables of answers with verdicts; `reward_cases.py` describes the tables."""

import time

import pytest

from recjax.grading.math_answers import guru_math, math
from tests.grading.reward_cases import BOX, changed_digits, lines_of
from tests.marks import campaign

PARTS = [0, *campaign(*range(1, 8))]


def cases():
    """(section, truth, answer, verdict, reason) of every row; a line that begins with # names a section."""
    section, rows = "", []
    for line in lines_of("math_cases.tsv"):
        if line.startswith("# "):
            section = line[2:]
        else:
            truth, answer, verdict, reason = line.split("\t")
            rows.append((section, truth, answer, int(verdict), reason))
    return rows


def ours(truth, answer):
    """The verdict of the package's grader."""
    return int(math(BOX % answer, truth, {})["accuracy"])


def test_no_verdict_of_the_table_is_wrong():
    assert [row for row in cases() if ours(*row[1:3]) != row[3]] == []


@pytest.mark.parametrize("part", PARTS)
def test_no_verdict_of_the_kinds_is_wrong(part):
    rows = [line.split("\t") for line in lines_of("math_kinds.tsv")]
    assert len(rows) > 1500 and len({(row[0], row[1], row[3]) for row in rows}) == len(rows)
    rows.sort(key=lambda row: row[4])
    firsts = [one for one, before in zip(rows, [None, *rows], strict=False) if before is None or one[4] != before[4]]
    graders = {"math": math, "guru_math": guru_math}
    graded = rows[part::8] + firsts * (part == 0)
    assert part or {row[4] for row in graded} == {row[4] for row in rows}, "the quick part has every kind"
    wrong = [row for row in graded if graders[row[3]](BOX % row[1], row[0], {})["accuracy"] != int(row[2])]
    assert wrong == []


# Answers of the review that are right, and that the grader refuses.
REFUSED = [("e^{2x}(2x+1)+C", r"\exp(2x)(2x+1)+K")]  # a constant of integration has the name C or c


@pytest.mark.parametrize("part", PARTS)
def test_the_wrong_verdicts_of_the_review_are_known(part):
    rows = [tuple(line.split("\t")) for line in lines_of("math_review.tsv")]
    assert len(rows) >= 460 and {row[3] for row in rows} == {"math"} and {row[:2] for row in rows} >= {*REFUSED}
    wrong = [row[:2] for row in rows[part::8] if ours(*row[:2]) != int(row[2])]
    assert wrong == [row[:2] for row in rows[part::8] if row[:2] in REFUSED]


@pytest.mark.parametrize("part", PARTS)
def test_no_truth_is_equal_to_itself_with_one_digit_changed(part):
    truths = lines_of("math_truths.txt")
    assert len({*truths}) == len(truths) >= 300
    accepted = []
    for truth in truths[part::8]:
        assert guru_math(BOX % f" {truth} ", truth, {})["accuracy"] == 1
        for changed in changed_digits(truth):
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


def test_every_section_of_the_table_has_its_cases_once():
    rows = cases()
    assert len(rows) >= 600 and len({row[0] for row in rows}) >= 15
    assert len({row[1:3] for row in rows}) == len(rows), "no case stands there twice"
    assert all(len(row[4]) > 2 and row[3] in (0, 1) for row in rows)
