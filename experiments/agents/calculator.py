"""The tool and the problems of experiments/agents/smollm2_calculator.yaml: products, and a calculator for them.

python -m experiments.agents.calculator                    writes the files of problems again
"""

import json
import random
import re
from pathlib import Path

FOLDER = Path(__file__).parent
TRAIN, HELD_OUT = 256, 128
FIRST_EXAMPLE, EXAMPLE = (264, 83), (312, 45)
NUMBERS = range(100, 1000), range(11, 100)
EXPRESSION = re.compile(r"\s*(\d{1,12})\s*([-+*])\s*(\d{1,12})\s*", re.ASCII)


def calculator(expression: str) -> str:
    """Computes the sum, difference or product of two whole numbers.

    Args:
        expression: two numbers with +, - or * between them, such as 12 + 5
    """
    found = EXPRESSION.fullmatch(expression)
    if not found:
        raise ValueError(f"{expression!r:.40} is not two whole numbers with +, - or * between them")
    first, operation, second = int(found[1]), found[2], int(found[3])
    return str({"+": first + second, "-": first - second, "*": first * second}[operation])


def call(first: int, second: int) -> str:
    """A call of the calculator, as a model writes it."""
    arguments = {"name": "calculator", "arguments": {"expression": f"{first} * {second}"}}
    return f"<tool_call>{json.dumps(arguments)}</tool_call>"


def question(first: int, second: int) -> dict[str, str]:
    """A user's message."""
    return {"role": "user", "content": f"What is {first} * {second}?"}


def with_tool(first: int, second: int) -> list[dict[str, str]]:
    """The question after examples of a call. SmolLM2's template does not tell of tools, so these messages do."""
    result = str(EXAMPLE[0] * EXAMPLE[1])
    return [
        {"role": "system", "content": f"Call the calculator: {call(*FIRST_EXAMPLE)}"},
        question(*EXAMPLE),
        {"role": "assistant", "content": call(*EXAMPLE)},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
        question(first, second),
    ]


def alone(first: int, second: int) -> list[dict[str, str]]:
    """The question after an example that is answered at once."""
    answer = {"role": "assistant", "content": str(EXAMPLE[0] * EXAMPLE[1])}
    return [{"role": "system", "content": "Answer."}, question(*EXAMPLE), answer, question(first, second)]


def write(folder: Path) -> None:
    """Writes the problems, of which none is in two places; those held out with the tool and without."""
    pairs = [
        (first, second)
        for first in NUMBERS[0]
        for second in NUMBERS[1]
        if (first, second) not in (FIRST_EXAMPLE, EXAMPLE)
    ]
    chosen = random.Random(0).sample(pairs, TRAIN + HELD_OUT)
    files = {
        "train": (with_tool, chosen[:TRAIN]),
        "held_out": (with_tool, chosen[TRAIN:]),
        "held_out_alone": (alone, chosen[TRAIN:]),
    }
    for name, (prompt, products) in files.items():
        rows = [{"prompt": prompt(first, second), "answer": str(first * second)} for first, second in products]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"calculator_{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(FOLDER)
