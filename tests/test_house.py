"""The package stays small: budgets of its rooms, the loop's imports, public names, small helpers, and words of pages.

The budgets are tables of docs/architecture.md. A commit that needs a larger budget raises it there and says why.
"""

import ast
import collections
import re

import pytest

from tests.test_rooms import PATHS, ROOT, imports, trees

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SMALL = 8  # lines of a helper's body
VAGUE = {"place", "one", "found", "part", "asked", "said", "own", "left", "given", "beside", "rest", "least"}
CENTRAL = [
    f"recjax.{name}"
    for name in (
        "algorithms.losses algorithms.ratios algorithms.advantages experience.group experience.batch experience.layout"
        " experience.queue experience.sources rollout.decoding rollout.engine training.loop training.run"
        " training.sources training.learner training.update"
    ).split()
]


def budgets(heading):
    """The first and the last column of the table under a heading."""
    section = PAGE.split(f"### {heading}\n")[1].split("\n#")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {row[0].strip("`/"): int(row[-1].replace(",", "")) for row in rows[2:]}


def statements(tree):
    """The number of statements, docstrings aside."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.stmt))
    return sum(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in nodes)


def room_of(name):
    """The folder of a file, or "top level"."""
    return name.split(".")[1] if PATHS[name].parent != ROOT / "recjax" else "top level"


def imported_through_others(start):
    """The file and every file of the package that it imports, directly or through other files."""
    reached, waiting = set(), [start]
    while waiting:
        if (name := waiting.pop()) not in reached and name in PATHS:
            reached.add(name)
            waiting += imports()[name]
    return reached


def public_names_of_several_files():
    names = collections.Counter(
        node.name
        for tree in trees().values()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") and node.name != "main"
    )
    return {name for name, count in names.items() if count > 1}


def small_helpers_called_once():
    """Private functions of at most SMALL lines, docstring aside, whose single use in their file is a call.

    Decorated functions and functions that are passed on need their name.
    """
    helpers = set()
    for module, tree in trees().items():
        nodes = list(ast.walk(tree))
        uses = collections.Counter(
            node.id if isinstance(node, ast.Name) else node.attr
            for node in nodes
            if isinstance(node, ast.Name | ast.Attribute)
        )
        functions = [node.func for node in nodes if isinstance(node, ast.Call)]
        called = {getattr(function, "id", getattr(function, "attr", None)) for function in functions}
        for node in nodes:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not re.match("_[^_]", node.name):
                continue
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            is_small = not body or body[-1].end_lineno - body[0].lineno < SMALL
            if is_small and uses[node.name] == 1 and node.name in called and not node.decorator_list:
                helpers.add(f"{module}.{node.name}")
    return helpers


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


ROOMS = budgets("Budgets of the rooms")
FIGURES = budgets("Other budgets")


def test_every_room_has_a_budget():
    assert ROOMS.keys() == {room_of(name) for name in PATHS}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_keep_their_budgets(room):
    size = sum(statements(tree) for name, tree in trees().items() if room_of(name) == room)
    assert size <= ROOMS[room], (
        f"{room} = {size} statements: the budget is {ROOMS[room]}; widen what is there, or raise the budget in "
        "docs/architecture.md and say why in the commit message"
    )


def test_the_loop_imports_no_more_than_its_share():
    reached = imported_through_others("recjax.training.loop")
    assert len(reached) <= FIGURES["files that the loop imports, through others"]
    assert sum(statements(trees()[name]) for name in reached) <= FIGURES["statements of these files"]


def test_a_public_name_is_defined_once():
    names = public_names_of_several_files()
    assert len(names) <= FIGURES["public names defined in several files"], (
        f"in several files: {', '.join(sorted(names))}"
    )


def is_pack(node):
    """True for `a, b = x, y`: several statements on one line."""
    values = getattr(node, "value", None)
    packs = isinstance(node, ast.Assign) and isinstance(values, ast.Tuple) and len(values.elts) > 1
    return packs and any(isinstance(target, ast.Tuple) for target in node.targets)


def test_a_line_has_one_statement():
    packs = sum(is_pack(node) for tree in trees().values() for node in ast.walk(tree))
    assert packs <= FIGURES["assignments of several values at once"], "give each value a line of its own"


def test_locals_name_their_content():
    found = collections.Counter(
        f"{module}: {node.id}"
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE
    )
    assert found.total() <= FIGURES["locals with a vague name"], "\n".join(sorted(found))


def code_and_comments(module):
    """The numbers of the lines with code, without docstrings, and the number of lines with a comment."""
    lines = PATHS[module].read_text(encoding="utf-8").splitlines()
    defined = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [
        node.body[0] for node in ast.walk(trees()[module]) if isinstance(node, defined) and ast.get_docstring(node)
    ]
    skipped = {number for text in texts for number in range(text.lineno, text.end_lineno + 1)}
    is_code = [bool(line.strip()) and not line.strip().startswith("#") for line in lines]
    code = {number for number, each in enumerate(is_code, 1) if each and number not in skipped}
    return code, sum(bool(re.search(r"(^|\s)#\s", line)) for line in lines)


def test_the_central_path_reads_aloud():
    """Short functions with few parameters, and a reason wherever a reader would ask for one."""
    too_long, too_many, code_lines, comments = [], [], 0, 0
    for module in CENTRAL:
        code, commented = code_and_comments(module)
        code_lines += len(code)
        comments += commented
        for node in ast.walk(trees()[module]):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = len(code & set(range(node.lineno, node.end_lineno + 1)))
                names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                parameters = len([name for name in names if name not in ("self", "cls")])
                if length > FIGURES["lines of code of a function on the central path"]:
                    too_long.append(f"{module}.{node.name}: {length}")
                if parameters > FIGURES["parameters of a function on the central path"]:
                    too_many.append(f"{module}.{node.name}: {parameters}")
    assert not too_long, f"cut where a concept ends: {too_long}"
    assert not too_many, f"pass a container: {too_many}"
    assert code_lines / comments <= FIGURES["lines of code for each comment on the central path"]


def test_small_helpers_are_written_where_they_are_called():
    helpers = small_helpers_called_once()
    assert len(helpers) <= FIGURES["helpers of at most 8 lines that are called once"], "\n".join(sorted(helpers))


def test_a_logprob_passes_few_functions():
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
    assert len(way) <= FIGURES["functions on the way of a log-probability"]
    assert len({module for module, _ in way}) <= FIGURES["files of these functions"]


GENERATED = {
    "configuration.md",
    "objectives.md",
    "papers.md",
    "claims.md",
    "claims/drift.md",
    "accelerator.md",
}  # written by commands
WORDS = {  # at most; a reason where a page describes more than the table of contents planned for
    "README.md": 700,
    # Get started
    "index.md": 250,
    "install.md": 300,
    "quickstart.md": 600,
    "concepts.md": 550,
    # Guides
    "tutorials/train_smollm2.md": 800,
    "tutorials/add_a_task.md": 750,
    "tutorials/add_a_loss.md": 780,  # outputs that a test compares, a term of your own
    "tutorials/from_python.md": 740,  # run(), its keys by name, open_run(), and cells that JSON cannot hold
    "regimes.md": 1_015,  # where sampled and mixed rows come from, what was measured, drift of the sampler
    "experience.md": 1_005,  # outputs that a test compares, following a store, rewards and their verdicts
    "asynchronous.md": 820,  # the table of servers and check_engine
    "fine_tuning.md": 735,  # demonstrations, PEFT adapters, continued runs
    "agents.md": 1_275,  # rewards of turns, seats, truncated and failed agents, an address for agents' clients, tools
    "serving.md": 940,  # rewards of turns, vLLM's API, limits of requests and connections, health
    "evaluation.md": 660,  # numerics, training problems, mixtures, verdicts and intervals of shares
    "sweeps.md": 565,  # two files and four outputs, which a test runs; verdicts from six seeds, plans for seeds
    "debugging.md": 830,
    "devices.md": 990,  # plans for absent devices, the paper's models, processes that differ, wait or stop
    "memory.md": 585,  # tables of remedies, parts and kernels, which runs check; dry runs for devices; JAX's share
    # Reference
    "configuration.md": 5_070,  # keys of the features above, of a teacher, drift and verdicts; how overrides are read
    "objectives.md": 4_200,
    "papers.md": 2_680,
    "metrics.md": 630,  # agents, mixtures, following, missing accuracies
    "store_format.md": 740,  # imports, sessions, graders, PostgreSQL, read-only copies
    "tasks.md": 920,  # messages, layouts of folders, mixtures, pass rates, curricula, templates, numbers, nulls
    "grading.md": 715,  # the library with its slots in TRL and verl, its rules, known limits, and the comparison
    "rewards.md": 1_395,  # classifiers, kinds and failures of custom functions, what they get; verdicts
    "models.md": 610,  # twenty-two families, experts, delta nets, refusals
    "faults.md": 935,  # what may differ at a resume; indexes, databases that are away or restored; lost processes
    "coming_from.md": 495,
    "glossary.md": 330,
    "api.md": 80,
    # Research
    "claims.md": 1_200,
    "claims/drift.md": 1_780,  # verdicts of two tasks, each age alone, confounds
    "performance.md": 700,
    "accelerator.md": 615,  # commands for parts of a device session
    "comparison.md": 440,
    # Project
    "architecture.md": 780,  # the table that follows a log-probability, budgets of the rooms
}
ALL_WORDS = 23_580


def words(text):
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_pages_stay_short():
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix(): path for path in docs.rglob("*.md")} | {"README.md": ROOT / "README.md"}
    counts = {name: words(path.read_text(encoding="utf-8")) for name, path in pages.items()}
    assert counts.keys() == WORDS.keys(), "every page has a budget"
    over = {name: count for name, count in counts.items() if count > WORDS[name]}
    assert not over, f"words above the budget: {over}; shorten, or move notes to experiments/ or benchmarks/RESULTS.md"
    written = sum(count for name, count in counts.items() if name not in GENERATED)
    assert written <= ALL_WORDS, f"docs have {written} words; shorten a page"
