"""docs/metrics.md has every metric that the code writes, and no other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.tiny_run import train

ROOT = Path(__file__).parents[2]
ROOMS = tuple("training experience algorithms models rollout agents sources remote logs runs store".split())
WRITERS = re.compile(r"metrics|counts|diagnose")  # functions that return metrics have such names
HOLDERS = {"metrics", "scalars", "logged", "measured"}  # local variables that hold metrics
# Names that the code composes of parts, and that the test's run has not.
ELSEWHERE = {"warm_start/loss", "warm_start/held_out_loss", "grading/NAME", "agent/NAME"}


def names_on_the_page() -> set[str]:
    """The names of the table's first column; a part that differs from run to run is NAME."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    known = set()
    for line in text.splitlines():
        if line.startswith("| `"):
            names = re.findall(r"`([^`]+)`", line.split("|")[1])
            stem = names[0].rpartition("/")[0]
            known |= {f"{stem}/{name}" if "/" not in name and stem else name.replace("…", stem) for name in names}
    return known


def keys(node: ast.AST) -> Iterator[str]:
    """The keys of dictionaries in a piece of code; a value in an f-string is NAME."""
    for part in ast.walk(node):
        found = part.keys if isinstance(part, ast.Dict) else [part.key] if isinstance(part, ast.DictComp) else []
        for key in found:
            pieces = key.values if isinstance(key, ast.JoinedStr) else [key]
            texts = [piece.value if isinstance(piece, ast.Constant) else "NAME" for piece in pieces]
            if key is not None and all(isinstance(text, str) for text in texts):
                yield "".join(texts)


def names_in_the_code() -> set[str]:
    """Keys of dictionaries that functions of WRITERS return, and that variables of HOLDERS get."""
    names = set()
    for path in (path for room in ROOMS for path in (ROOT / "recjax" / room).glob("*.py")):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        for function in functions:
            for node in ast.walk(function):
                if isinstance(node, ast.Return) and node.value and WRITERS.search(function.name):
                    names.update(keys(node.value))
                for target in getattr(node, "targets", [getattr(node, "target", None)]):
                    place = target.value if isinstance(target, ast.Subscript) else target
                    if isinstance(node, ast.Assign | ast.AugAssign) and getattr(place, "id", None) in HOLDERS:
                        names.update(
                            keys(ast.Dict([target.slice], [node.value]) if place is not target else node.value)
                        )
    return names - {"NAME", "NAME/NAME"}  # names that are composed elsewhere


def is_among(names: set[str], name: str) -> bool:
    """True if a name is one of `names`; in each of them, NAME may be anything."""
    return any(re.fullmatch(re.escape(known).replace("NAME", ".+"), name) for known in names)


def test_the_page_has_every_metric_of_the_code():
    page, code = names_on_the_page(), names_in_the_code()
    assert {"engine/pushes", "follow/rewarded_groups", "expert_load_max", "teacher_kl", "weight/max"} <= code
    # A name of the code that is whole is on the page as it is; one with NAME may have several names there.
    whole = {name for name in code if "NAME" not in name}
    assert not whole - page
    assert not [name for name in code - whole if not any(is_among({name}, known) for known in page)]


@pytest.mark.slow
def test_the_page_lists_exactly_a_runs_metrics(tiny):
    options = [
        "experience={replay: {}}",
        "evaluation.initial_kl=true",
        "training.steps=2",
        "training.checkpoint_every=2",
    ]
    written = {name for row in train(tiny("run", *options)) for name in row}
    page, code = names_on_the_page(), names_in_the_code()
    assert len(written) > 30 and not [name for name in written if not is_among(page, name)]
    assert {name for name in page - code - written if not is_among(code, name)} == ELSEWHERE
