"""The calculator's problems: a call that copies the question has the answer."""

import json
import re

import pytest

from experiments.agents import calculator
from recjax.agents.tools import parsed_calls


def rows_of(folder, name):
    return [json.loads(line) for line in (folder / f"calculator_{name}.jsonl").read_text().splitlines()]


def asked(row):
    return re.fullmatch(r"What is (\d+) \* (\d+)\?", row["prompt"][-1]["content"]).groups()


def test_the_committed_files_are_those_of_the_command(tmp_path):
    calculator.write(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_text() == (calculator.FOLDER / path.name).read_text()
    assert len(list(tmp_path.iterdir())) == len(list(calculator.FOLDER.glob("calculator_*.jsonl"))) == 3


def test_calls_copy_the_question_and_splits_are_disjoint():
    train, held_out, alone = (rows_of(calculator.FOLDER, name) for name in ("train", "held_out", "held_out_alone"))
    for row in train + held_out:
        (call,) = parsed_calls(calculator.call(*asked(row)))
        assert calculator.calculator(**call.arguments) == row["answer"]
    assert [(asked(row), row["answer"]) for row in alone] == [(asked(row), row["answer"]) for row in held_out]
    products = [asked(row) for row in train + held_out]
    shown = [tuple(map(str, pair)) for pair in (calculator.FIRST_EXAMPLE, calculator.EXAMPLE)]
    assert len({*products, *shown}) == len(products) + 2


@pytest.mark.parametrize("expression", ["", "12", "2 ** 9", "1 / 2", "__import__('os')", "9" * 13 + " * 1", "1.5 * 2"])
def test_the_calculator_takes_two_whole_numbers(expression):
    with pytest.raises(ValueError, match="two whole numbers"):
        calculator.calculator(expression)
