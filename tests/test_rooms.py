"""Which files may import which."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "recjax"


def imported(file):
    """Names of the modules that a file imports, anywhere in it, those of functions and classes among them."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_no_file_imports_a_command():
    files = {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file for file in PACKAGE.rglob("*.py")}
    commands = {name for name, file in files.items() if "app.run(" in file.read_text()}
    assert {"recjax.train", "recjax.sweep", "recjax.hub.smollm2"} < commands
    assert {name: found for name, file in files.items() if (found := imported(file) & commands)} == {}
