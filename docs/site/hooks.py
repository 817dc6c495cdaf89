"""The site's own steps: the README is its first page, and links to files of the repository lead to copies of them."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
# [text](../recjax/training/loop.py#L3): out of docs/, into the repository.
_OUT = re.compile(r"\]\(\.\./([\w./-]+)")


def on_files(files, config):
    """Adds the README, and every file of the repository that a page links to."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    readme = re.sub(r"\]\(docs/", "](", readme).replace("](SECURITY.md", "](../SECURITY.md")
    files.append(File.generated(config, "index.md", content=readme))
    pages = [file.content_string for file in files.documentation_pages()]
    for path in sorted({path for page in pages for path in _OUT.findall(page)}):
        if (ROOT / path).is_file():  # a link to what is not there stays as it is, and a strict build refuses it
            files.append(File.generated(config, f"source/{path}.txt", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Points links out of docs/ at the copies."""

    def copied(link: re.Match) -> str:
        name = f"source/{link[1]}.txt"
        return f"]({name}" if files.get_file_from_path(name) else link[0]

    return _OUT.sub(copied, markdown)
