"""docs/metrics.md has every metric that a run writes."""

import re
from pathlib import Path

from tests.training.tiny_run import train

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_has_every_metric_of_a_run(tiny):
    options = [
        "experience={replay: {}}",
        "evaluation.initial_kl=true",
        "training.steps=2",
        "training.checkpoint_every=2",
    ]
    written = {name for row in train(tiny("run", *options)) for name in row}
    cells = [line.split("|")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    known = set()
    for cell in cells:
        names = re.findall(r"`([^`]+)`", cell)
        stem = names[0].rpartition("/")[0]
        known |= {name.replace("…", stem) for name in names}
        known |= {f"{stem}/{name}" for name in names if "/" not in name}
    groups = {name.removesuffix("NAME") for name in known if name.endswith("/NAME")}
    missing = {name for name in written - known if not name.startswith(tuple(groups))}
    assert not missing and len(written) > 30
