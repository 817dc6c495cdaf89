"""Fills the HTML templates of this folder; texts and pictures become part of the page, which needs no network."""

import base64
import functools
import io

import jinja2
from matplotlib.figure import Figure

from recjax.plots.style import finish


def page(template: str, **values: object) -> str:
    """A page of a template; it shows all texts among the values as texts and reads none of them as HTML."""
    text = _templates().get_template(template).render(values)
    return text.encode("utf-8", "replace").decode("utf-8")  # half of a surrogate pair has no bytes


@functools.cache
def _templates() -> jinja2.Environment:
    """The templates, with escaped values; a value that a template reads and does not get is an error."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("recjax.plots", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def inlined(picture: bytes) -> str:
    """A PNG as the source of an `img` element."""
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def png(figure: Figure) -> bytes:
    """A finished figure as a PNG."""
    file = io.BytesIO()
    finish(figure).savefig(file, format="png", dpi=110)
    return file.getvalue()
