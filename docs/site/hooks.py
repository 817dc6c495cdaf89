"""The site: notebook, commands and modules are pages, links to code lead to copies, equations are drawn."""

import ast
import base64
import hashlib
import html
import io
import json
import re
import textwrap
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import MathTextParser
from mkdocs.structure.files import File

from recjax.runtime.usage import command_file, flags_of

ROOT = Path(__file__).parents[2]
NOTEBOOK = "tutorials/quickstart.ipynb"
PROJECT = {name: name.lower() for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")}
# Pages that a search shows first (what one looks up and where one begins), and last (modules, changes).
BOOSTS = {"configuration.md": 30, "objectives.md": 15, "metrics.md": 8, "quickstart.md": 4, "changelog.md": 0.5}
MODULES_BOOST = 0.2
HOME = "Off-policy RL for language models in JAX"
DESCRIPTION = 160  # characters, which search engines show
# [text](../recjax/training/loop.py#L3), or ../../ in a folder of docs/: out of docs/, into the repository.
_OUT = re.compile(r"\]\((?:\.\./)+([\w./-]+)")
# [text](tests/tiny.py): a link in a file at the repository's root, without an address and not within the page.
_FROM_ROOT = re.compile(r"\]\((?!#|\w+:)")
# A line of docs/api.md names a module, which gets a page.
_MODULE = re.compile(r"^- \[([\w.]+)\]\(\.\./([\w/]+\.py)\)$", re.M)
# What arithmatex makes of $$…$$ and $…$.
_EQUATION = re.compile(r'<(div|span) class="arithmatex">\\[\[(](.*?)\\[\])]</\1>', re.S)
_TABLE = re.compile(r"<table>.*?</table>", re.S)
# The sign with which a cell of a verdict begins (SIGNS of experiments/claims/verdicts.py), and the class of the cell.
VERDICTS = {"✓": "for", "(✓)": "for", "▲": "for", "✗": "against", "▼": "against", "○": "open", "◇": "open", "≈": "open"}
_VERDICT = re.compile(f"<td>({'|'.join(map(re.escape, VERDICTS))})(?= |</td>)")
_NAME = re.compile(r"<code>[\w.…]{20,}</code>")


def on_config(config):
    """Adds the pages of modules to the navigation, below the API's own page."""
    for section in config["nav"]:
        for entry in next(iter(section.values())):
            if entry.get("API") == "api.md":
                entry["API"] = ["api.md", *({name.partition(".")[2]: f"api/{name}.md"} for name, _ in modules())]
    return config


def modules() -> list[tuple[str, str]]:
    """Name and path of every module in docs/api.md."""
    return _MODULE.findall((ROOT / "docs" / "api.md").read_text(encoding="utf-8"))


def on_files(files, config):
    """Adds the notebook, the files of the project, and every file of the repository that a page links to."""
    for name, page in PROJECT.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        text = _FROM_ROOT.sub("](../", text).replace("](../docs/", "](")
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "cli.md", content=commands_page()))
    for name, _ in modules():
        files.append(File.generated(config, f"api/{name}.md", content=f"# {name}\n\n::: {name}\n"))
    page, pictures = notebook_page((ROOT / "docs" / NOTEBOOK).read_text(encoding="utf-8"))
    files.append(File.generated(config, NOTEBOOK.replace(".ipynb", ".md"), content=page))
    for name, picture in pictures.items():
        files.append(File.generated(config, f"tutorials/{name}", content=picture))
    pages = [file.content_string for file in files.documentation_pages()]
    for path in sorted({path for page in pages for path in _OUT.findall(page)}):
        if (ROOT / path).is_file():  # a link to what is not there stays as it is, and a strict build refuses it
            files.append(File.generated(config, copy_of(path), abs_src_path=str(ROOT / path)))
    return files


def copy_of(path: str) -> str:
    """The place on the site of a file of the repository; a site has no names that begin with a dot."""
    return f"source/{path.lstrip('.')}.txt"


def commands_page() -> str:
    """Every command with its usage and its flags, from the source of `python -m recjax.NAME --help`."""
    parts = ["# Command line\n\nEvery command prints this text with `--help`."]
    folder = ROOT / "recjax"
    # A command is a module, or __main__ of a room, which has the command's name.
    names = [path.stem for path in folder.glob("*.py")] + [path.parent.name for path in folder.glob("*/__main__.py")]
    for name in sorted(names):
        path = command_file(name)
        if path is None:
            continue
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        # Four blanks begin a block of code in a docstring, as in Markdown; brackets in other lines are no links.
        usage = re.sub(r"^(?! {4}).*", lambda line: line[0].replace("[", r"\["), docstring, flags=re.M)
        parts.append(f"## recjax.{name}\n\n{usage}")
        lines = [f"| `--{flag.name}` | {flag.meaning} |" for flag in flags_of(path)]
        if lines:
            parts.append("\n".join(["| flag | meaning |", "|---|---|", *lines]))
    return "\n\n".join(parts) + "\n"


def notebook_page(text: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by name."""
    parts, pictures = [], {}
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        printed = "".join("".join(output.get("text", "")) for output in cell.get("outputs", []))
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
        for data in (output.get("data", {}) for output in cell.get("outputs", [])):
            if "image/png" in data:
                name = f"quickstart_{len(pictures)}.png"
                pictures[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![Figure {len(pictures)} of the notebook]({name})")
            elif "text/html" in data:
                table = re.sub(r"<style.*?</style>|^\s+", "", "".join(data["text/html"]), flags=re.S | re.M)
                parts.append(table.replace(' border="1" class="dataframe"', ""))
    return "\n\n".join(parts) + "\n", pictures


def on_page_markdown(markdown, page, config, files):
    """Points links out of docs/ at the pages or copies that stand for them, and says what a search should know."""
    if page.file.src_uri == "index.md":
        page.meta["title"] = HOME
    page.meta["description"] = description(markdown) or config["site_description"]
    boost = MODULES_BOOST if page.file.src_uri.startswith("api/") else BOOSTS.get(page.file.src_uri, 1)
    page.meta["search"] = {"boost": boost}
    markdown = markdown.replace("quickstart.ipynb)", "quickstart.md)")
    if page.file.src_uri == "api.md":
        markdown = _MODULE.sub(described, markdown)
    up = "../" * page.file.src_uri.count("/")

    def copied(link: re.Match) -> str:
        if link[1] in PROJECT:
            return f"]({up}{PROJECT[link[1]]}"
        name = copy_of(link[1])
        return f"]({up}{name}" if files.get_file_from_path(name) else link[0]

    return _OUT.sub(copied, markdown)


def description(markdown: str) -> str:
    """The first paragraph of words, as plain text that ends with a word."""
    for paragraph in markdown.split("\n\n"):
        if re.match(r"[\w*\[`]", paragraph):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)|[*`$]", r"\1", " ".join(paragraph.split()))
            return textwrap.shorten(words, DESCRIPTION, placeholder=" …")
    return ""


def described(line: re.Match) -> str:
    """A link to a module's page, with the first line of its docstring."""
    tree = ast.parse((ROOT / line[2]).read_text(encoding="utf-8"))
    return f"- [{line[1]}](api/{line[1]}.md): {ast.get_docstring(tree).splitlines()[0]}"


def on_page_content(content, page, config, files):
    """Draws equations, lets names in wide tables break, and marks drawn tables, whose lines must not wrap."""
    content = _EQUATION.sub(equation, content)
    content = _TABLE.sub(breakable, content)
    content = _VERDICT.sub(lambda cell: f'<td class="verdict-{VERDICTS[cell[1]]}">{cell[1]}', content)
    return re.sub(
        r'<div class="([^"]*\bhighlight)">(?=(?:(?!</div>).)*[│┃])', r'<div class="\1 drawn">', content, flags=re.S
    )


def breakable(table: re.Match) -> str:
    """A table of five columns or more, whose longer names may break after a dot or an underscore."""
    if table[0].count("<th>") < 5:
        return table[0]
    return _NAME.sub(lambda name: re.sub(r"(?<=[._])(?=[\w.]{4})", "<wbr>", name[0]), table[0])


def equation(found: re.Match) -> str:
    """An equation as SVG in the color of the text, which needs no script and no font of the reader's."""
    tex, is_block = " ".join(html.unescape(found[2]).split()), found[1] == "div"
    font, file = FontProperties(size=10, math_fontfamily="cm"), io.StringIO()
    width, height, depth, *_ = MathTextParser("path").parse(f"${tex}$", dpi=72, prop=font)
    figure = Figure(figsize=(width / 72, height / 72))
    figure.text(0, depth / height, f"${tex}$", fontproperties=font)
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawing = re.sub(r"^.*?<svg ", "<svg ", file.getvalue(), flags=re.S)
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.S)
    # Names of glyphs are unique in a page.
    prefix = f"e{hashlib.sha256(tex.encode()).hexdigest()[:8]}"
    drawing = re.sub(r'(id="|xlink:href="#)', rf"\g<1>{prefix}", drawing)
    size = f'width="{width / 10:.3f}em" height="{height / 10:.3f}em" style="vertical-align: {-depth / 10:.3f}em"'
    drawing = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', size, drawing, count=1)
    kind, label = "equation-block" if is_block else "equation-inline", html.escape(tex, quote=True)
    drawing = drawing.replace("<svg ", f'<svg role="img" aria-label="{label}" fill="currentColor" ', 1)
    return f'<{found[1]} class="{kind}">{drawing}</{found[1]}>'
