"""Shows the content of an experience store: numbers, a figure and a few random samples.

    python -m recjax.inspect_experience STORE [--figure FILE.png] [--samples N] [--seed S]

A group has signal if its rewards differ: group-relative algorithms learn only from such groups.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Column, Table

from recjax.console import command, plain_console, start
from recjax.experience.group import is_whole, reward_spread
from recjax.experience.rows import groups_of
from recjax.experience.store import Experience, read
from recjax.plots.store import by_source, draw_store, length

FLAGS = flags.FLAGS


def summary(rows: Sequence[Experience]) -> dict[str, str]:
    """Summary numbers of the rows, by name; a group has only members among `rows`."""
    groups, scored = groups_of(rows), [row.reward for row in rows if row.reward is not None]
    sizes = [len(group.completions) for group in groups]
    whole = [group for group in groups if is_whole(group)]
    accurate = [row.accurate for row in rows if row.accurate is not None]
    versions = [row.policy_version for row in rows if row.policy_version is not None]
    lengths = [tokens for row in rows if (tokens := length(row)) is not None]
    return {
        "rows": str(len(rows)),
        "groups": str(len(groups)),
        "group size": _span(sizes),
        "pending rows": str(len(rows) - len(scored)),
        "groups with a pending row": str(len(groups) - len(whole)),
        "whole groups with signal": f"{sum(reward_spread(group) > 0 for group in whole)} of {len(whole)}",
        "groups of several sources": str(sum(len({row.source for row in group.completions}) > 1 for group in groups)),
        "reward": f"{np.mean(scored):.3f} ({min(scored):g} to {max(scored):g})" if scored else "none yet",
        "accurate": f"{np.mean(accurate):.3f}" if accurate else "not known",
        "policy versions": _span(versions) if versions else "none",
        "rows of other models": str(len(rows) - len(versions)),
        "with behavior log-probs": str(sum(row.behavior_logprobs is not None for row in rows)),
        "tokenized": str(len(lengths)),
        "completion tokens": f"{np.mean(lengths):.1f} ({_span(lengths)})" if lengths else "not known",
        "truncated": f"{np.mean([row.truncated for row in rows]):.3f}",
    }


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def chosen_rows(rows: Sequence[Experience], count: int, seed: int) -> list[Experience]:
    """A random sample of `count` rows, or all rows if there are fewer, in the store's order."""
    places = np.random.default_rng(seed).choice(len(rows), min(count, len(rows)), replace=False)
    return [rows[place] for place in sorted(places)]


def print_summary(rows: Sequence[Experience], samples: Sequence[Experience], console: Console) -> None:
    """Prints summaries of all rows and of each source, then the samples."""
    sources = by_source(rows)
    columns = {"all": summary(rows)} | {name: summary(each) for name, each in sources.items() if len(sources) > 1}
    table = Table(Column("", no_wrap=True), *columns)
    for name in columns["all"]:
        table.add_row(name, *(column[name] for column in columns.values()))
    console.print(table)
    for row in samples:
        asked = row.prompt if row.messages is None else " / ".join(turn["content"] for turn in row.messages)
        reward = "pending" if row.reward is None else f"{row.reward:g}"
        console.print(f"{row.source} · {row.id} · reward {reward}", style="bold", highlight=False)
        for text in (asked, row.completion):
            console.print(f"  {text[:400]!r}{'…' if len(text) > 400 else ''}", highlight=False)


@command
def main(argv: list[str]) -> None:
    """Reads the store and shows its content."""
    if len(argv) != 2:
        raise ValueError("give one store: python -m recjax.inspect_experience STORE")
    rows = read(argv[1])
    print_summary(rows, chosen_rows(rows, FLAGS.samples, FLAGS.seed), plain_console())
    if FLAGS.figure:
        draw_store(rows, f"{argv[1]}: {len(rows)} rows", Path(FLAGS.figure))
        print(f"figure: {FLAGS.figure}")
    else:
        print("--figure FILE.png draws rewards, lengths and versions")


if __name__ == "__main__":
    # Not at module level: absl flags are global, and importing this module must not define them.
    flags.DEFINE_string("figure", None, "File for a figure; default: no figure.")
    flags.DEFINE_integer("samples", 5, "Number of random rows to show.", lower_bound=0)
    flags.DEFINE_integer("seed", 0, "Seed of the random rows.")
    start(main)
