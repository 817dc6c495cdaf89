"""The site in headless Chromium, as wide as a laptop and as a phone: nothing is clipped, and dark mode is dark.

Needs `pip install -e ".[docs]"` and Chromium: Debian's package chromium, or `playwright install chromium`.
"""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
LAPTOP, PHONE = 1280, 400
# A page of each kind, for screenshots.
KINDS = {
    "index.html": "home",
    "objectives/index.html": "equation",
    "api/recjax.experience.group/index.html": "module",
    "configuration/index.html": "generated",
    "tutorials/quickstart/index.html": "notebook",
    "tutorials/train_smollm2/index.html": "tutorial",
    "claims/index.html": "figures",
    "cli/index.html": "commands",
    "comparison/index.html": "table",
}
# On a phone, wide tables and drawn output may scroll in a box of their own; nothing else may be wider than its box.
CLIPPED = """(is_phone) => {
    const clipped = [], page = document.documentElement;
    if (page.scrollWidth > page.clientWidth) clipped.push(`the page, by ${page.scrollWidth - page.clientWidth} px`);
    const boxes = ".md-content :is(pre > code, .md-typeset__scrollwrap, .equation-block, p, li, h1, h2, h3)";
    for (const box of document.querySelectorAll(boxes)) {
        const excess = box.scrollWidth - box.clientWidth;  // 5 px are the padding of code at the end of a line
        const style = getComputedStyle(box), may_scroll = is_phone && /auto|scroll/.test(style.overflowX) && (
            box.matches(".md-typeset__scrollwrap, .equation-block, p:has(> img)")
            || box.closest(".drawn, .highlighttable"));
        const is_shown = box.clientWidth > 0 && style.display != "inline" && !box.closest("details:not([open])");
        if (excess > 5 && is_shown && !may_scroll)
            clipped.push(`${box.tagName} by ${excess} px: ${box.innerText.slice(0, 60)}`);
    }
    for (const image of document.images)
        if (!image.naturalWidth) clipped.push(`picture ${image.src} is missing`);
    return clipped;
}"""
# Resolves when the page will not change any more: fonts are there and every picture is decoded.
IS_DRAWN = """() => Promise.all([document.fonts.ready, ...[...document.images].map(
    image => image.naturalWidth ? image.decode() : null)])"""
PATIENCE = 120_000  # milliseconds for one action, also while other tests take all cores
GROUND_AND_TEXT = """() => [
    getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector(".md-typeset")).color,
].map(color => color.match(/[\\d.]+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 765)"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    for module in ("material", "mkdocstrings", "playwright"):
        pytest.importorskip(module, reason='needs pip install -e ".[docs]"')
    folder = os.environ.get("RECJAX_SITE") or tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return Path(folder)


@pytest.fixture(scope="module")
def browser(site):
    """Headless Chromium."""
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as playwright:
        try:
            chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        except Error as error:
            pytest.skip(f"Chromium does not start: {error}")
        yield chromium
        chromium.close()


def new_page(browser, width, **options):
    """A page without animations."""
    page = browser.new_page(viewport={"width": width, "height": 1000}, reduced_motion="reduce", **options)
    page.set_default_timeout(PATIENCE)
    return page


def visit(page, path):
    """Opens a file, and waits until it is drawn."""
    page.goto(path.as_uri())
    page.evaluate(IS_DRAWN)


def test_links_lead_somewhere(site):
    anchors, dead = {}, []
    for page in site.rglob("index.html"):
        text = page.read_text(encoding="utf-8")
        anchors[page] = set(re.findall(r'\bid="([^"]*)"', text))
    for page in anchors:
        for link in set(re.findall(r'(?:href|src)="([^"]*)"', page.read_text(encoding="utf-8"))):
            address = urlsplit(html.unescape(link))
            if address.scheme or address.netloc:
                continue
            target = (page.parent / unquote(address.path)).resolve() if address.path else page
            if target.is_dir():
                target /= "index.html"
            known = anchors.get(target, {unquote(address.fragment)})
            if not target.is_file() or (address.fragment and unquote(address.fragment) not in known):
                dead.append(f"{page.parent.relative_to(site)}: {link}")
    assert not dead, "\n".join(dead)


def test_search_knows_parts_of_keys_and_prefers_reference(site):
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    words = re.split(index["config"]["separator"], "experience.replay={draw_every: 3}")
    assert {"experience", "replay", "draw", "every"} <= set(words)
    boosts = {entry["location"].partition("/")[0]: entry["boost"] for entry in index["docs"]}
    assert boosts["configuration"] == max(boosts.values())
    assert boosts["api"] == min(boosts.values())


@pytest.mark.parametrize("width", [LAPTOP, PHONE])
def test_nothing_is_clipped(site, browser, width):
    page = new_page(browser, width)
    clipped = {}
    for path in sorted(site.rglob("index.html")):
        visit(page, path)
        if found := page.evaluate(CLIPPED, width == PHONE):
            clipped[path.parent.relative_to(site).as_posix()] = found
    page.close()
    assert not clipped, "\n".join(f"{name}: {each}" for name, found in clipped.items() for each in found)


def test_screenshots_in_light_and_dark(site, browser, tmp_path):
    """Screenshots of each kind of page, which --basetemp keeps; in dark mode the page is dark and its text light."""
    assert all((site / path).is_file() for path in KINDS)
    for scheme in ("light", "dark"):
        for width in (LAPTOP, PHONE):
            page = new_page(browser, width, color_scheme=scheme)
            for path, kind in KINDS.items():
                visit(page, site / path)
                page.screenshot(path=tmp_path / f"{kind}_{width}_{scheme}.png", animations="disabled")
                ground, text = page.evaluate(GROUND_AND_TEXT)
                assert (ground, text) == pytest.approx((0.13, 0.8) if scheme == "dark" else (1, 0.1), abs=0.15)
            page.close()
    pictures = {picture.name: picture.read_bytes() for picture in tmp_path.iterdir()}
    assert len(set(pictures.values())) == 4 * len(KINDS)
