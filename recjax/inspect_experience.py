"""Shows the content of an experience store: numbers, a figure and a few random samples.

    python -m recjax.inspect_experience STORE [--figure FILE.png] [--samples N] [--seed S]
    python -m recjax.inspect_experience STORE --rebuild

A group has signal if its rewards differ: group-relative algorithms learn only from such groups. --rebuild makes the
indexes of a damaged store again from its rows.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Column, Table

from recjax.errors import UserError
from recjax.experience.group import is_whole, reward_spread
from recjax.experience.records import Record, groups_of
from recjax.plots.store import by_source, draw_store, has_logprobs, length
from recjax.runtime.console import command, plain_console, start
from recjax.store.store import Store

FLAGS = flags.FLAGS


def summary(records: Sequence[Record]) -> dict[str, str]:
    """Summary numbers of the completions, by name; a group has only members among `records`."""
    rows = [record.completion for record in records]
    groups = groups_of(records)
    scored = [row.grade.reward for row in rows if row.grade]
    rewards = [reward for reward in scored if reward is not None]
    sizes = [len(group.completions) for group in groups]
    whole = [group for group in groups if is_whole(group)]
    accurate = [row.grade.accurate for row in rows if row.grade and row.grade.accurate is not None]
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
        "reward": f"{np.mean(rewards):.3f} ({min(rewards):g} to {max(rewards):g})" if rewards else "none yet",
        "accurate": f"{np.mean(accurate):.3f}" if accurate else "not known",
        "policy versions": _span(versions) if versions else "none",
        "rows of other models": str(len(rows) - len(versions)),
        "with behavior log-probs": str(sum(has_logprobs(row) for row in rows)),
        "tokenized": str(len(lengths)),
        "completion tokens": f"{np.mean(lengths):.1f} ({_span(lengths)})" if lengths else "not known",
        "truncated": f"{np.mean([row.truncated for row in rows]):.3f}",
    }


def _span(values: Sequence[int]) -> str:
    low = min(values)
    high = max(values)
    return str(low) if low == high else f"{low} to {high}"


def print_summary(records: Sequence[Record], samples: Sequence[Record], console: Console) -> None:
    """Prints summaries of all completions and of each source, then the samples."""
    sources = by_source(records)
    columns = {"all": summary(records)} | {name: summary(each) for name, each in sources.items() if len(sources) > 1}
    table = Table(Column("", no_wrap=True), *columns)
    for name in columns["all"]:
        table.add_row(name, *(column[name] for column in columns.values()))
    console.print(table)
    for record in samples:
        prompt = record.group.prompt
        row = record.completion
        prompt_text = prompt if isinstance(prompt, str) else " / ".join(turn["content"] for turn in prompt)
        reward = f"{row.grade.reward:g}" if row.grade else "pending"
        console.print(f"{row.source} · {row.id} · reward {reward}", style="bold", highlight=False)
        for text in (prompt_text, row.text):
            console.print(f"  {text[:400]!r}{'…' if len(text) > 400 else ''}", highlight=False)


def chosen_records(records: Sequence[Record], count: int, seed: int) -> list[Record]:
    """A random sample of `count` completions, or all if there are fewer, in the store's order."""
    indices = np.random.default_rng(seed).choice(len(records), min(count, len(records)), replace=False)
    return [records[index] for index in sorted(indices)]


@command
def main(argv: list[str]) -> None:
    """Reads the store and shows its content."""
    if len(argv) != 2:
        raise UserError(problem="give one store: python -m recjax.inspect_experience STORE")
    with Store(argv[1]) as store:
        if FLAGS.rebuild:
            store.rebuild_indexes()
        store.check_indexes()
        records = list(store.records())
        if not records:
            raise UserError(store.name, "has no completions")
        print_summary(records, chosen_records(records, FLAGS.samples, FLAGS.seed), plain_console())
        if FLAGS.figure:
            draw_store(records, f"{store.name}: {len(records)} rows", Path(FLAGS.figure))
    if FLAGS.figure:
        print(f"figure: {FLAGS.figure}")
    else:
        print("--figure FILE.png draws rewards, lengths and versions")


if __name__ == "__main__":
    flags.DEFINE_string("figure", None, "File for a figure; default: no figure.")
    flags.DEFINE_bool("rebuild", False, "True to make the store's indexes again from its rows.")
    flags.DEFINE_integer("samples", 5, "Number of random rows to show.", lower_bound=0)
    flags.DEFINE_integer("seed", 0, "Seed of the random rows.")
    start(main)
