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
    completions = [record.completion for record in records]
    groups = groups_of(records)
    grades = [completion.grade for completion in completions if completion.grade]
    whole = [group for group in groups if is_whole(group)]
    with_signal = [group for group in whole if reward_spread(group) > 0]
    mixed_groups = 0
    for group in groups:
        sources = {completion.source for completion in group.completions}
        if len(sources) > 1:
            mixed_groups += 1
    rewards = [grade.reward for grade in grades if grade.reward is not None]
    reward = "none yet"
    if rewards:
        reward = f"{np.mean(rewards):.3f} ({min(rewards):g} to {max(rewards):g})"
    accurate = [grade.accurate for grade in grades if grade.accurate is not None]
    versions = [completion.policy_version for completion in completions if completion.policy_version is not None]
    lengths = []
    for completion in completions:
        tokens = length(completion)
        if tokens is not None:
            lengths.append(tokens)
    return {
        "rows": str(len(completions)),
        "groups": str(len(groups)),
        "group size": _span([len(group.completions) for group in groups]),
        "pending rows": str(len(completions) - len(grades)),
        "groups with a pending row": str(len(groups) - len(whole)),
        "whole groups with signal": f"{len(with_signal)} of {len(whole)}",
        "groups of several sources": str(mixed_groups),
        "reward": reward,
        "accurate": f"{np.mean(accurate):.3f}" if accurate else "not known",
        "policy versions": _span(versions) if versions else "none",
        "rows of other models": str(len(completions) - len(versions)),
        "with behavior log-probs": str(sum(has_logprobs(completion) for completion in completions)),
        "tokenized": str(len(lengths)),
        "completion tokens": f"{np.mean(lengths):.1f} ({_span(lengths)})" if lengths else "not known",
        "truncated": f"{np.mean([completion.truncated for completion in completions]):.3f}",
    }


def _span(values: Sequence[int]) -> str:
    low = min(values)
    high = max(values)
    if low == high:
        return str(low)
    return f"{low} to {high}"


def print_summary(records: Sequence[Record], samples: Sequence[Record], console: Console) -> None:
    """Prints summaries of all completions and of each source, then the samples."""
    columns = {"all": summary(records)}
    sources = by_source(records)
    if len(sources) > 1:
        for source, source_records in sources.items():
            columns[source] = summary(source_records)
    table = Table(Column("", no_wrap=True), *columns)
    for name in columns["all"]:
        table.add_row(name, *(column[name] for column in columns.values()))
    console.print(table)
    for record in samples:
        prompt = record.group.prompt
        completion = record.completion
        prompt_text = prompt if isinstance(prompt, str) else " / ".join(turn["content"] for turn in prompt)
        reward = f"{completion.grade.reward:g}" if completion.grade else "pending"
        console.print(f"{completion.source} · {completion.id} · reward {reward}", style="bold", highlight=False)
        for text in (prompt_text, completion.text):
            end = "…" if len(text) > 400 else ""
            console.print(f"  {text[:400]!r}{end}", highlight=False)


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
