"""A run's kept completions as one HTML page, which opens from disk without a network."""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from recjax.files import json_text


def sample_page(name: str, about: str, rows: Sequence[dict[str, Any]]) -> str:
    """The page; texts of prompts and completions reach it as data and are never read as HTML.

    Args:
        name: name of the run.
        about: description of the run in a few words.
        rows: as `recjax.training.kept_samples` writes them, in order of steps.
    """
    data = json_text({"name": name, "about": about, "rows": list(rows)}, ensure_ascii=False)
    # "<" would end the element that holds the data, were it of "</script>".
    data = data.replace("<", "\\u003c")
    template = files("recjax.plots").joinpath("sample_page.html").read_text(encoding="utf-8")
    return template.replace("{{data}}", data)
