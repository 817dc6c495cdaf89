"""The comparison with math-verify on docs/grading.md is the kept one, of the tables as they are."""

import json

from benchmarks.grading import PAGE, RESULT, comparison
from tests.grading.reward_cases import math_tables


def test_the_page_has_the_kept_comparison_of_all_tables():
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    assert comparison(result) in PAGE.read_text(encoding="utf-8"), "run python -m benchmarks.grading --compare"
    sizes = {name: (len(rows), sum(right for *_, right in rows)) for name, rows in math_tables().items()}
    kept = {name: (counts["answers"], counts["right"]) for name, counts in result["tables"].items()}
    assert kept == sizes, "the tables have other rows: run python -m benchmarks.grading --compare"
    assert {"recjax", "math-verify"} <= result["versions"].keys()
