"""Completions of a store, graded by the run's own reward."""

import json
from pathlib import Path

import numpy as np

from recjax import hosts
from recjax.experience.group import Grade, Group
from recjax.experience.sources import by_prompt
from recjax.experience.stored import with_rewards
from recjax.rollout.collecting import Grades
from recjax.tasks.problems import Problem, question_of
from recjax.training.metrics import progress_bar
from recjax.training.run import Run
from recjax.whole_files import write_whole


def regraded(run: Run) -> Run:
    """The run with grades of its own for what it has from a store, made once and kept in the run's folder.

    A problem's answer and columns are the task's where that asks the same prompt, and else what the store has.

    Raises:
        ValueError: a prompt without a known answer, a reward function at fault, or a file of grades that is damaged.
    """
    path = Path(run.config.output) / "regraded.jsonl"
    groups = run.stored.groups
    grades = _read(path, groups) if path.exists() else _made(run, groups, path)
    hosts.wait_for_all("the grades of a store")
    stored = with_rewards(run.stored, grades, run.config)
    return run._replace(stored=stored, others=by_prompt(stored.groups) if run.others else {})


def _made(run: Run, groups: list[Group], path: Path) -> dict[str, Grade]:
    """Grades by completion id, from the reward; written to the file when all are there."""
    known = _known_problems(run)
    asked = [(group, *_asked(group, known, run)) for group in groups]
    rows = [(text, completion, problem) for group, text, problem in asked for completion in group.completions]
    rollout, grades = run.config.rollout, {}
    size = rollout.prompts_per_step * rollout.group_size  # a batch at a time, as the run grades
    with run.grading as grading, progress_bar("regrading", len(rows)) as bar:
        for first in range(0, len(rows), size):
            batch = rows[first : first + size]
            own = [batch[place] for place in hosts.share(len(batch))]
            scores = grading.submit(
                [text for text, _, _ in own],
                [completion.text for _, completion, _ in own],
                [problem.answer for _, _, problem in own],
                [problem.columns for _, _, problem in own],
                np.array([len(completion.tokens) for _, completion, _ in own]),
            )
            found = Grades(scores, len(batch)).result()
            grades |= {completion.id: grade for (_, completion, _), grade in zip(batch, found, strict=True)}
            bar.update(len(batch))
    if hosts.is_first():
        write_whole(path, "".join(json.dumps([name, *grade]) + "\n" for name, grade in grades.items()))
    return grades


def _known_problems(run: Run) -> dict[bytes, tuple[str, Problem]]:
    """The task's prompts as the model sees them and their problems, by the prompt's tokens."""
    known = {}
    for prompts in (run.held_out, run.train):
        for tokens, mask, text, problem in zip(*prompts, strict=True):
            known[tokens[mask].tobytes()] = (text, problem)
    return known


def _asked(group: Group, known: dict[bytes, tuple[str, Problem]], run: Run) -> tuple[str, Problem]:
    """The prompt of a group as the model sees it, and its problem."""
    found = known.get(group.prompt_tokens.tobytes())
    if found is None and group.answer is None:
        raise ValueError(
            f"experience.regrade: group {group.id!r} asks {question_of(group.prompt)!r:.100}, which is no prompt of the"
            " task, and the store has no answer to it; import it with its answer, or leave experience.regrade out"
        )
    return found or (run.policy.tokenizer.decode(group.prompt_tokens), Problem(group.prompt, group.answer))


def _read(path: Path, groups: list[Group]) -> dict[str, Grade]:
    """The grades that an earlier start of the run has made."""
    try:
        rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        grades = {name: Grade(*grade) for name, *grade in rows}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: not the grades that this run made ({error}); bring them back from a copy") from error
    for completion in (completion for group in groups for completion in group.completions):
        if completion.id not in grades:
            raise ValueError(
                f"{path}: has no grade of {completion.id!r}, which the store has now; give another output, or put the"
                " store's rows back"
            )
    return grades
