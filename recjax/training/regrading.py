"""Completions of a store, graded by the run's own reward."""

import json
from pathlib import Path

from recjax import hosts
from recjax.experience.group import Grade, Group
from recjax.experience.sources import by_prompt
from recjax.experience.stored import with_rewards
from recjax.rollout.collecting import Grades
from recjax.tasks.grading.pool import Answered
from recjax.tasks.problems import Problem, question_of
from recjax.training.metrics import progress_bar
from recjax.training.run import Run
from recjax.whole_files import write_whole

Asked = list[tuple[str, Problem]]


def asked_problems(run: Run) -> Asked:
    """The prompt of each group of the store as the model sees it, and its problem.

    Answer and columns are the task's where that asks the same prompt, and else what the store has.

    Raises:
        ValueError: a prompt without a known answer.
    """
    known = _known_problems(run)
    return [_asked(group, known, run) for group in run.stored.groups]


def regraded(run: Run, asked: Asked) -> Run:
    """The run with grades of its own for what it has from a store, made once and kept in the run's folder.

    Args:
        asked: of `asked_problems`.
    Raises:
        ValueError: a reward function at fault, or a file of grades that is damaged.
    """
    path = Path(run.config.output) / "regraded.jsonl"
    groups = run.stored.groups
    grades = _read(path, groups) if path.exists() else _made(run, groups, asked, path)
    hosts.wait_for_all("the grades of a store")
    stored = with_rewards(run.stored, grades, run.config)
    return run._replace(stored=stored, others=by_prompt(stored.groups) if run.others else {})


def _made(run: Run, groups: list[Group], asked: Asked, path: Path) -> dict[str, Grade]:
    """Grades by completion id, from the reward; written to the file when all are there."""
    rows = [(*own, completion) for group, own in zip(groups, asked, strict=True) for completion in group.completions]
    rollout, grades = run.config.rollout, {}
    size = rollout.prompts_per_step * rollout.group_size  # a batch at a time, as the run grades
    with run.grading as grading, progress_bar("regrading", len(rows)) as bar:
        for first in range(0, len(rows), size):
            batch = rows[first : first + size]
            own = [
                Answered(text, completion.text, problem.answer, problem.columns, len(completion.tokens))
                for text, problem, completion in (batch[place] for place in hosts.share(len(batch)))
            ]
            found = Grades(grading.submit(own), len(batch)).result()
            grades |= {completion.id: grade for (_, _, completion), grade in zip(batch, found, strict=True)}
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
            f"experience.regrade: group {group.id!r} asks {question_of(group.prompt)!r:.100}, which is not among the"
            " task's problems to train or to evaluate on, and the store has no answer to it; import it with its"
            " answer, or leave experience.regrade out"
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
