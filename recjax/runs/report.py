"""Writes a run's report.html: settings, curves, warnings, completions and commands on one page to send to others."""

import itertools
import json
import logging
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from recjax.config import PASSED, PYTHON
from recjax.logs.kept_samples import samples_folder
from recjax.logs.warnings import given_warnings
from recjax.plots.page import inlined, page
from recjax.runs.overview import NONE, Overview, own_settings, read_overview
from recjax.runtime.files import write_whole

NAME = "report.html"
COMPLETIONS = 10
LONGEST = 1500  # characters of a prompt or completion on a page
# Names of metrics that count what a run left out → what they count.
_LEFT_OUT_SO_FAR = {
    "experience/left_out/": "left out of the experience",
    "engine/unusable": "unusable replies of the sampling server",
}
_LEFT_OUT_BY_STEP = {
    "grading/": "completions without a grade",
    "agent/": "failed agents",
    "impossible_tokens/": "tokens of probability 0",
}

logger = logging.getLogger(__name__)


def write_report(run: Path, figures: Sequence[bytes], ending: str | None = None) -> Path:
    """Writes report.html into a run folder and returns its path.

    Args:
        figures: PNG files.
        ending: how the run ended, in words, if this process still holds its folder.
    Raises:
        UserError: config.yaml or metrics.jsonl is damaged, or the page cannot be written.
    """
    overview = read_overview(run)
    if ending:
        overview = overview._replace(is_running=False)
    output = run / NAME
    values = report_values(overview)
    if ending:
        values["state"] = ending
    write_whole(output, page("report.html", figures=[inlined(figure) for figure in figures], **values))
    return output


def try_report(run: Path, ending: str, draw: Callable[[], Any] = lambda: None) -> None:
    """Writes the report of a run that has ended, with the figures in its folder; a failure is only a warning.

    Args:
        ending: how the run ended, in words.
        draw: draws the figures first.
    """
    try:
        draw()
        figures = [path.read_bytes() for path in sorted((run / "figures").glob("*.png"), reverse=True)]
        write_report(run, figures, ending)
    except Exception as error:  # the run itself is complete
        logger.warning("%s: not written (%s: %s)", run / NAME, type(error).__name__, error)


def report_values(overview: Overview) -> dict[str, Any]:
    """All texts of a report, apart from the figures."""
    made_with: dict[str, Any] = {}
    if overview.starts:
        made_with = overview.starts[-1]
    source, completions = page_completions(overview.folder)
    facts = {
        "steps": f"{overview.steps} of {overview.planned_steps or NONE}",
        "held-out accuracy": _before_and_after(overview, "evaluation/accuracy"),
        "held-out reward": _before_and_after(overview, "evaluation/reward"),
        "reward of the last batch": number_text(overview.last("reward")),
        "hours": number_text(overview.hours),
        "completion tokens per second": number_text(overview.last("tokens_per_second"), 0),
        "initial policy": overview.base or NONE,
        "devices": made_with.get("devices", NONE),
        "recjax": made_with.get("recjax", NONE),
        "commit": (made_with.get("commit") or NONE)[:10],
        "starts": str(len(overview.starts)),
    }
    preset = overview.settings.get("algorithm.preset", "")
    return {
        "name": overview.folder.resolve().name,
        "preset": preset,
        "state": overview.state,
        "written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "facts": {name: text for name, text in facts.items() if text != NONE},
        "warnings": given_warnings(overview.rows),
        "settings": own_settings(overview),
        "completions_of": source,
        "completions": completions,
        "left_out": left_out(overview.rows),
        "commands": commands(overview),
    }


def number_text(value: Any, places: int = 3) -> str:
    """A number as text; a dash for anything else."""
    if not isinstance(value, int | float):
        return NONE
    return f"{value:.{places}f}"


def _before_and_after(overview: Overview, metric: str) -> str:
    """The first and the latest value of a metric as text; a dash without any."""
    values = [row[metric] for row in overview.rows if metric in row]
    if not values:
        return NONE
    if len(values) == 1:
        return number_text(values[0])
    return f"{number_text(values[0])} → {number_text(values[-1])}"


def page_completions(run: Path, count: int = COMPLETIONS) -> tuple[str, list[dict[str, Any]]]:
    """The first completions of the latest evaluation, or of the latest batch that the run kept; and their source.

    A completion has `question`, `text`, `before` (the text before training, or None), `verdict` and `facts`.
    """
    latest: list[dict[str, Any]] = []
    for name in ("before", "latest", "after"):
        rows = _first_rows(run / "samples" / f"{name}.jsonl", count)
        if rows and (not latest or _step(rows) >= _step(latest)):
            latest = rows
    before = {row.get("prompt"): row for row in _first_rows(run / "samples" / "before.jsonl", count)}
    if latest:
        step = _step(latest)
        shown = [_shown(row, before.get(row.get("prompt")) if step else None) for row in latest]
        return f"held-out problems after step {step}", shown
    for path in sorted(samples_folder(run).glob("*.jsonl"), reverse=True):
        rows = _first_rows(path, count)
        if rows:
            return f"the training batch of step {rows[0].get('step')}", [_shown(row, None) for row in rows]
    return "", []


def _step(rows: Sequence[dict[str, Any]]) -> int:
    """The optimizer step after which completions were sampled; 0 if they have none, as of older versions."""
    step = rows[0].get("step")
    return step if isinstance(step, int) else 0


def _first_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """The first rows of a JSON Lines file; none if it does not exist or is damaged."""
    rows = []
    try:
        with path.open(encoding="utf-8") as file:
            for line in itertools.islice(file, count):
                row = json.loads(line)
                if isinstance(row, dict):
                    rows.append(row)
    except (OSError, ValueError):
        return []
    return rows


def _shown(row: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """A completion of an evaluation or of a training batch, as pages show it.

    Args:
        before: the completion of the same problem before training.
    """
    verdict = ""
    if row.get("accurate") is not None:
        verdict = "right" if row["accurate"] else "wrong"
    facts = [f"reward {number_text(row.get('reward'))}"]
    if row.get("answer"):
        facts.append(f"answer {shortened_text(row['answer'], 80)}")
    if row.get("truncated"):
        facts.append("truncated")
    earlier_text = None
    if before is not None:
        earlier_text = shortened_text(before.get("completion", ""))
    return {
        "question": shortened_text(row.get("question", row.get("prompt", ""))),
        "text": shortened_text(row.get("completion", row.get("text", ""))),
        "before": earlier_text,
        "verdict": verdict,
        "facts": " · ".join(facts),
    }


def shortened_text(text: Any, longest: int = LONGEST) -> str:
    """The text, or its beginning and the number of other characters."""
    text = str(text)
    if len(text) <= longest:
        return text
    return f"{text[:longest]} … ({len(text) - longest:,} more characters)"


def left_out(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """What a run did not train on, by reason: words about it, and how many."""
    counts: Counter[str] = Counter()
    kept = []
    for row in rows:
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        if "kept_fraction" in numbers:
            kept.append(numbers["kept_fraction"])
        for name, value in numbers.items():
            for family, words in _LEFT_OUT_SO_FAR.items():
                if name.startswith(family):
                    label = _reason(words, name.removeprefix(family))
                    counts[label] = max(counts[label], int(value))
            for family, words in _LEFT_OUT_BY_STEP.items():
                if name.startswith(family):
                    counts[_reason(words, name.removeprefix(family))] += int(value)
    found = [(label, f"{count:,}") for label, count in counts.items() if count]
    if kept and sum(kept) < len(kept):
        share = 1 - sum(kept) / len(kept)
        found.append(("completions without a gradient: masked, or dropped by the algorithm", f"{share:.1%}"))
    return found


def _reason(words: str, reason: str) -> str:
    if not reason:
        return words
    return f"{words}: {reason.replace('_', ' ')}"


def commands(overview: Overview) -> list[tuple[str, str]]:
    """Commands to continue the run, to plot it and to look at its samples, each with its purpose."""
    folder = shlex.quote(str(overview.folder))
    return [
        ("continue", _continue_command(overview)),
        ("draw any metric", f"python -m recjax.plot {folder} --metrics reward,entropy"),
        ("look at samples token by token", f"python -m recjax.samples {folder}"),
        ("compare with another run", f"python -m recjax.compare {folder} OTHER_RUN"),
        ("list all runs of its folder", f"python -m recjax.runs {shlex.quote(str(overview.folder.parent))}"),
    ]


def _continue_command(overview: Overview) -> str:
    """The command that resumes an unfinished run, or trains a finished one further."""
    settings = overview.settings
    problems = str(settings.get("task.file.train", ""))
    reward = str(settings.get("task.reward") or "")
    folder = str(overview.folder)
    if problems.startswith(f"{PASSED}:") or reward.startswith(PYTHON):
        return f"the same call of recjax.run(…, output={folder!r}), with more steps if the run is finished"
    words = ["python -m recjax.train --config", shlex.quote(str(overview.folder / "config.yaml"))]
    if overview.state != "finished":
        words.append(shlex.quote(f"output={folder}"))
    elif settings.get("optimizer.schedule") == "constant":
        words += [shlex.quote(f"output={folder}"), f"training.steps={2 * (overview.planned_steps or 0)}"]
    else:
        # The learning rates of a schedule follow from the number of steps, so a new run continues.
        words += [shlex.quote(f"model.run={folder}"), shlex.quote(f"output={folder}-continued")]
        if settings.get("warm_start", ...) is not None:
            words.append("warm_start=null")
        if settings.get("model.adapter"):
            words.append("model.adapter=null")
    return " ".join(words)
