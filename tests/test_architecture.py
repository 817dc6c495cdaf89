"""The package is as docs/architecture.md describes it: rooms, each public name once, the way of a log-probability."""

import ast
import collections
import re
import tomllib

from experiments.diagrams import room_imports
from tests.package_files import PATHS, ROOT, trees

CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def public_names_of_several_files():
    names = collections.Counter()
    for tree in trees().values():
        kinds = ast.FunctionDef | ast.ClassDef
        defined = {node.name for node in tree.body if isinstance(node, kinds)}  # once, also with overloads
        names.update(name for name in defined if not name.startswith("_") and name != "main")
    return {name for name, count in names.items() if count > 1}


def way_of_a_logprob():
    """The functions of docs/architecture.md's table, as (file, name); a method's name includes its class."""
    section = PAGE.split("## The way of a log-probability\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| \d+ \| `([\w.]+)` in `([\w/.]+)` \|", section, re.MULTILINE)
    return [(f"recjax.{file.removesuffix('.py').replace('/', '.')}", name) for name, file in rows]


def definition(module, name):
    """The syntax tree of a function or of a method `Class.method`."""
    node = trees()[module]
    for part in name.split("."):
        kinds = ast.FunctionDef | ast.ClassDef
        node = next((one for one in node.body if isinstance(one, kinds) and one.name == part), None)
        assert node is not None, f"docs/architecture.md: {module} has no {name}; correct the table"
    return node


def called_by(module, name, functions):
    """Those of the functions that a function calls itself.

    A function is called by its name where that is defined or imported, or as an attribute of its module or of an object
    that holds it under its name; a method is called as an attribute of any object.
    """
    calls = [node.func for node in ast.walk(definition(module, name)) if isinstance(node, ast.Call)]
    plain = {node.id for node in calls if isinstance(node, ast.Name)}
    attributes = {(getattr(node.value, "id", None), node.attr) for node in calls if isinstance(node, ast.Attribute)}
    sources = {module: set()}  # the names that the file has from each file, and each file's own name in it
    for node in ast.walk(trees()[module]):
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            sources.setdefault(node.module, set()).add(alias.asname or alias.name)
            sources.setdefault(f"{node.module}.{alias.name}", set()).add(None)
    for other, function in functions:
        short = function.rpartition(".")[2]
        is_method, holders = "." in function, {other.rpartition(".")[2], "self"}
        by_name = not is_method and short in plain and (other == module or short in sources.get(other, ()))
        held = {attribute for holder, attribute in attributes if is_method or holder in holders}
        if by_name or (short in held and (is_method or other in sources)):
            yield other, function


def test_a_public_name_is_defined_once():
    names = public_names_of_several_files()
    assert not names, f"in several files: {', '.join(sorted(names))}"


def test_the_page_follows_a_logprob():
    """Another function of the table calls each of them, from the loop on; so none between is missing."""
    way = way_of_a_logprob()
    (start,) = [one for one in way if one[1] == "train_steps"]
    assert "drain" in ast.dump(definition(*way[0])) and way[-1] == ("recjax.algorithms.losses", "token_loss")
    reached, waiting = set(), [start]
    while waiting:
        if (function := waiting.pop()) not in reached:
            reached.add(function)
            waiting += called_by(*function, way)
    missing = [function for function in way if function not in reached]
    assert not missing, f"no function of the table calls {missing}: add the functions between to docs/architecture.md"


def test_every_command_starts_in_the_same_way():
    starts = '\nif __name__ == "__main__":\n'
    package = ROOT / "recjax"
    files = [path for path in package.glob("*.py") if path.name != "__main__.py"]
    files += package.glob("*/__main__.py")
    texts = {path.relative_to(package).as_posix(): path.read_text(encoding="utf-8") for path in files}
    commands = {name: text for name, text in texts.items() if starts in text}
    assert {"train.py", "sweep.py", "runs/__main__.py"} <= commands.keys()
    assert [name for name, text in commands.items() if not text.endswith("    start(main)\n")] == []


def test_contributing_names_every_picture_and_its_command():
    rows = CONTRIBUTING.read_text(encoding="utf-8").split("### Pictures\n")[1].split("\n## ")[0].splitlines()
    named = [
        name for row in rows if row.startswith("| `") for name in re.findall(r"`([^`]+)`", row.strip("|").split("|")[0])
    ]
    folders = [ROOT / name for name in ("docs", "experiments", "benchmarks")]
    pictures = [path for folder in folders for path in folder.rglob("*.*") if path.suffix in (".png", ".svg", ".gif")]
    assert sorted(named) == sorted(path.relative_to(ROOT).as_posix() for path in pictures)


def test_imports_of_rooms_lead_downwards_in_the_picture():
    counts = room_imports(ROOT / "recjax")
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    order = [name for line in contract[0]["layers"] for name in line.split(" | ")]
    upwards = [
        (importing, imported)
        for importing, imported in counts
        if importing in order and imported in order and order.index(importing) > order.index(imported)
    ]
    assert not upwards and counts["commands", "analysis"]


def test_the_page_has_the_sentence_of_each_room():
    section = PAGE.split("## Rooms\n")[1]
    rows = re.findall(r"^\| `(\w+)/` \| (.+) \|$", section, re.MULTILINE)
    rooms = [
        path.parent.name for path in PATHS.values() if path.name == "__init__.py" and path.parent != ROOT / "recjax"
    ]
    sentences = {room: ast.get_docstring(trees()[f"recjax.{room}"]).split("\n")[0] for room in rooms}
    assert dict(rows) == sentences
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"][
        0
    ]
    names = [name for line in layers["layers"] for name in line.split(" | ")]
    assert [room for room, _ in rows] == [name for name in names if name in sentences], "in the order of the contract"
