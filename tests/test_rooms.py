"""Who may import whom: commands are imported by nobody, rooms by those above them, files never in a circle."""

import ast
import copy
import functools
import graphlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From the lowest to the highest; those that stand together do not import each other. The commands are above them all,
# and right below them is api.py, which programs import: the package itself imports it by name, on first use.
FLOORS = [
    ("algorithms", "grading", "examples"),
    ("models",),
    ("hub",),
    ("tasks.grading",),
    ("tasks",),
    ("experience",),
    ("rollout", "plots"),
    ("training", "serving"),
    ("planning", "analysis"),
    ("api",),
]
# Files that the config may import besides `algorithms`: tables and checks that need no heavy package.
LIGHT = {"recjax.examples", "recjax.models.sampling", "recjax.grading.graders", "recjax.grading.gym"}

PATHS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "recjax").rglob("*.py"))
}


@functools.cache
def trees():
    """The syntax tree of every file of the package, by name."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in PATHS.items()}


def imports_of(path, tree):
    """The files of the package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: line {node.lineno}: a relative import; name the module in full"
            whole = {alias: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in PATHS else node.module for name in whole.values()}
    return {name for name in found if name.split(".")[0] == "recjax"}


@functools.cache
def imports():
    """The names of the files that every file imports, by name."""
    return {name: imports_of(PATHS[name], tree) for name, tree in trees().items()}


def is_command(name):
    """Whether a file directly in recjax/ is run as a program; `__main__` only starts the others."""
    if name == "recjax.__main__":
        return False
    return name.count(".") == 1 and '\nif __name__ == "__main__":' in PATHS[name].read_text(encoding="utf-8")


def room_of(name):
    """The room that a file is in; None for those directly in recjax/."""
    inner = name.removeprefix("recjax").removeprefix(".")
    rooms = [room for floor in FLOORS for room in floor if f"{inner}.".startswith(f"{room}.")]
    return max(rooms, key=len, default=None)


def floor_of(room):
    return next(height for height, floor in enumerate(FLOORS) if room in floor)


def test_every_file_has_its_room():
    folders = {path.parent.relative_to(ROOT / "recjax") for path in PATHS.values()} - {Path("."), Path("config")}
    unknown = [str(folder) for folder in folders if room_of(f"recjax.{'.'.join(folder.parts)}") is None]
    assert not unknown, f"name the floor of {', '.join(sorted(unknown))} in FLOORS"
    assert {"recjax.train", "recjax.sweep", "recjax.plot"} <= set(filter(is_command, PATHS))


def test_nobody_imports_a_command():
    wrong = [(name, other) for name, others in imports().items() for other in others if is_command(other)]
    assert not wrong, "\n".join(f"{name} imports {other}, a command: move what both need" for name, other in wrong)


def test_every_command_starts_in_the_same_way():
    texts = {name: PATHS[name].read_text(encoding="utf-8") for name in PATHS if is_command(name)}
    assert [name for name, text in texts.items() if not text.endswith("    start(main)\n")] == []


def test_rooms_import_what_is_below_them():
    wrong = []
    for name, others in imports().items():
        here = room_of(name)
        for other in sorted(others):
            there = room_of(other)
            if None not in (here, there) and here != there and floor_of(there) >= floor_of(here):
                wrong.append(f"{name} imports {other}: {there} is not below {here}")
    assert not wrong, "\n".join(wrong)


def test_the_grader_is_a_library_of_its_own():
    own = {name for name in PATHS if room_of(name) == "grading"}
    assert "recjax.grading.math_answers" in own
    wrong = [f"{name} imports {other}" for name in sorted(own) for other in sorted(imports()[name] - own)]
    assert not wrong, "\n".join(wrong)
    nodes = [node for name in own for node in ast.walk(trees()[name])]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    others = {module.split(".")[0] for module in modules} - sys.stdlib_module_names
    assert others == {"recjax", "sympy", "mpmath", "reasoning_gym"}, (
        "docs/grading.md names the packages that the grader needs"
    )


def test_the_config_imports_algorithms_and_light_tables_alone():
    wrong = []
    for name, others in imports().items():
        if room_of(name) is None and not is_command(name):
            heavy = sorted(other for other in others - LIGHT if room_of(other) not in (None, "algorithms"))
            wrong += [f"{name} imports {other}, and everybody imports {name}" for other in heavy]
    assert not wrong, "\n".join(wrong)


def test_the_queue_needs_no_database():
    reached, left = set(), ["recjax.experience.queue"]
    while left:
        reached.add(name := left.pop())
        left += imports()[name] - reached
    nodes = [(name, node) for name in reached for node in ast.walk(trees()[name])]
    modules = [(name, alias.name) for name, node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [(name, node.module) for name, node in nodes if isinstance(node, ast.ImportFrom)]
    assert [name for name, module in modules if module.split(".")[0] == "sqlalchemy"] == []


class WithoutTypes(ast.NodeTransformer):
    """Removes the blocks of imports for a type checker, which Python does not run."""

    def visit_If(self, node):
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return ast.Pass()
        return self.generic_visit(node)


def test_no_imports_go_in_a_circle():
    run = {name: WithoutTypes().visit(copy.deepcopy(tree)) for name, tree in trees().items()}
    try:
        graphlib.TopologicalSorter({name: imports_of(PATHS[name], tree) for name, tree in run.items()}).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"imports in a circle: {' <- '.join(error.args[1])}")
