"""The mathematical graders on tables of answers with verdicts; `reward_cases.py` describes the tables."""

import time

import pytest

from recjax.grading.math_answers import guru_math, math
from tests.grading.reward_cases import BOX, changed_digits, completion_of, lines_of
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


# Wrong verdicts that experiments/math/README.md documents: (truth, answer) by table.
KNOWN = {
    "math_review.tsv": [("e^{2x}(2x+1)+C", r"\exp(2x)(2x+1)+K")],  # a constant of integration has the name C or c
    "math_pairs.tsv": [
        ("J", "J. 12 m/s"),  # a choice with its text
        ("J", r"\text{(J) 12 m/s}"),
        ("1234567", "12,34,567"),  # separators and decimal commas of other countries
        ("1234567", "1.234.567"),
        ("3.5", "3,5"),
        ("3.5", "3{,}5"),
        (r"2\frac{1}{3}", r"2+\frac{1}{3}"),  # computations
        (r"\frac{35}{128}", r"\binom{8}{4}/2^8"),
        (r"A_5^2", "P(5,2)"),  # a point, or a function
        ("3-2", "1"),  # a difference, not a score
        (r"\emptyset", r"\text{no solution}"),  # synonyms and plurals
        (r"\emptyset", r"\text{empty set}"),
        (r"\text{no solution}", "no solutions"),
        (r"\text{no solution}", r"\text{There is no solution}"),
        (r"\text{no solution}", "无解"),
        (r"\begin{pmatrix} 4 \\ -1 \end{pmatrix}", "(4,-1)"),  # a pair is no column
        ("5", r"5\text{ Stück}"),  # units in other languages
        ("5", r"5\text{ часов}"),
        ("5", r"5\text{ mètres}"),
        ("5", "5명"),
        (r"\ln (x-1)^2", r"2\ln|x-1|"),  # the power of a logarithm, or of its argument
        (r"\sqrt{(x-1)(x-2)}", r"\sqrt{x-1}\cdot\sqrt{x-2}"),  # a part of the domain
        (r"\ln(x^2-1)", r"\ln(x-1)+\ln(x+1)"),
        ("5", r"$\boxed{5}\%$"),  # 10% equals 10, and also 0.1
        ("1234", "1234%"),
        ("0.1", "0.1%"),
        ("1", "1%"),
    ],
}


@pytest.mark.parametrize("table", KNOWN)
@pytest.mark.parametrize("part", PARTS)
def test_the_wrong_verdicts_of_a_table_are_documented(table, part):
    rows = [tuple(line.split("\t")) for line in lines_of(table)]
    assert len({(row[:2], row[3]) for row in rows}) == len(rows) >= 460
    assert {row[:2] for row in rows} >= {*KNOWN[table]}
    graders = {"math": math, "guru_math": guru_math}
    wrong = []
    for truth, answer, verdict, reward, _ in rows[part::8]:
        grader, completion = completion_of(answer, reward)
        if graders[grader](completion, truth, {})["accuracy"] != int(verdict):
            wrong.append((truth, answer))
    assert wrong == [row[:2] for row in rows[part::8] if row[:2] in KNOWN[table]]


@pytest.mark.parametrize("part", PARTS)
def test_a_changed_digit_makes_a_truth_wrong(part):
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
