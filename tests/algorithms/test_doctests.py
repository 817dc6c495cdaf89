"""The example of every public function of `algorithms`, and those of docs/derivation.md, print what they say."""

import ast
import doctest
import importlib
from pathlib import Path

import pytest

import recjax.algorithms
from tests.marks import slow_except
from tests.test_tutorials import ROOT, blocks

MODULES = sorted(path.stem for path in Path(recjax.algorithms.__file__).parent.glob("[a-z]*.py"))


def public_functions(module) -> dict[str, ast.FunctionDef]:
    """Read from the source: at run time a function may stand in a wrapper that checks its shapes."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name: node for node in functions if not node.name.startswith("_")}


@pytest.mark.parametrize("name", slow_except(MODULES, "losses"))
def test_every_public_function_has_a_true_example(name):
    module = importlib.import_module(f"recjax.algorithms.{name}")
    runner, said = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF), []
    parser = doctest.DocTestParser()
    # The lines in the module's docstring begin every example of the module.
    beginning = parser.get_doctest(module.__doc__, dict(vars(module)), name, None, 0)
    runner.run(beginning, out=said.append, clear_globs=False)
    for title, node in public_functions(module).items():
        # A copy: an example's names are no other example's.
        example = parser.get_doctest(ast.get_docstring(node), dict(beginning.globs), title, None, 0)
        assert example.examples, f"{name}.{title} has no example"
        runner.run(example, out=said.append)
    assert not runner.summarize(verbose=False).failed, "".join(said)


def test_each_line_of_the_derivation_is_true():
    examples = [block.text for block in blocks(ROOT / "docs" / "derivation.md") if block.language == "python"]
    said = []
    runner = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF)
    parsed = doctest.DocTestParser().get_doctest("\n".join(examples), {}, "docs/derivation.md", None, 0)
    runner.run(parsed, out=said.append)
    assert not runner.summarize(verbose=False).failed, "".join(said)
