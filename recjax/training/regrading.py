"""Grades the completions of a store with the reward of the run."""

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from recjax import hosts
from recjax.experience.group import Completion, Grade
from recjax.experience.stored import with_rewards
from recjax.experience.stored_groups import ByPrompt, StoredGroups
from recjax.files import whole_file
from recjax.rollout.collecting import Grades
from recjax.rollout.trajectory import thoughts_opening
from recjax.tasks.grading.pool import Answered
from recjax.tasks.problems import Problem, question_of
from recjax.training.metrics import step_bar
from recjax.training.run import Run

Known = dict[bytes, tuple[str, Problem]]  # rendered prompt and problem of the task, by prompt tokens


class Regraded(Sequence[Grade]):
    """Grades of a store's completions, group by group; each access reads a grade from the file in the run folder."""

    def __init__(self, path: Path, groups: StoredGroups):
        """Finds the line of each completion in the file.

        Args:
            groups: all groups of the store.
        Raises:
            ValueError: the file is damaged or lacks a completion of the store.
        """
        lines, self._file = _lines(path), path.open("rb")
        places = []
        for (name,) in groups.columns(["id"]):
            # The lines have the order of the store.
            places.append(next((place for known, place in lines if known == name), None))
            if places[-1] is None:
                raise ValueError(
                    f"{path}: has no grade of {name!r}, which the store contains; give another output=…, or put back"
                    " the store's rows"
                )
        self._places = np.array(places, np.int64)

    def __len__(self) -> int:
        """The number of grades."""
        return len(self._places)

    def __getitem__(self, number: int) -> Grade:
        """The grade of a completion."""
        self._file.seek(self._places[number])
        return Grade(*json.loads(self._file.readline())[1:])


def known_problems(run: Run) -> Known:
    """The task's problems by prompt tokens; checks that each group of the store has a problem or an answer.

    Raises:
        ValueError: a prompt of the store has no known answer.
    """
    known = {}
    for prompts in (run.held_out, run.train):
        for tokens, mask, text, problem in zip(*prompts, strict=True):
            known[tokens[mask].tobytes()] = (text, problem)
    for group in run.stored.groups:
        if group.answer is None and group.prompt_tokens.tobytes() not in known:
            raise ValueError(
                f"experience.regrade: group {group.id!r} asks {question_of(group.prompt)!r:.100}, but neither the task"
                " nor the store has an answer to it; import it with its answer, or remove experience.regrade"
            )
    return known


def regraded(run: Run, known: Known) -> Run:
    """The run with its own grades for stored completions, which are computed once and kept in the run folder.

    Raises:
        ValueError: the reward function fails, or the file of grades is damaged.
    """
    path = Path(run.config.output) / "regraded.jsonl"
    if not path.exists():
        _made(run, known, path)
    hosts.wait_for_all("the grades of a store")
    stored = with_rewards(run.stored, Regraded(path, run.stored.groups), run.config)
    return run._replace(stored=stored, others=ByPrompt(stored.groups) if run.others else None)


def _made(run: Run, known: Known, path: Path) -> None:
    """Grades all completions with the reward and writes the file, which appears once it is complete."""
    groups, rollout = run.stored.groups, run.config.rollout
    tokenizer = run.policy.tokenizer

    def rows() -> Iterator[tuple[Completion, str, Problem, str]]:
        for group in groups:
            # Answer and columns come from the task if it has the same prompt; otherwise the answer is the store's.
            text, problem = known.get(group.prompt_tokens.tobytes()) or (
                tokenizer.decode(group.prompt_tokens),
                Problem(group.prompt, group.answer),
            )
            for one in group.completions:
                yield one, text, problem, thoughts_opening(one, tokenizer)

    left = rows()
    size = rollout.prompts_per_step * rollout.group_size  # one batch at a time, as in training
    file = whole_file(path) if hosts.is_first() else contextlib.nullcontext()
    with run.grading as grading, step_bar("regrading", len(groups.heads)) as bar, file as file:
        while batch := list(itertools.islice(left, size)):
            own = [
                Answered(text, completion.text, problem.answer, problem.columns, completion.sampled_tokens, opening)
                for completion, text, problem, opening in (batch[place] for place in hosts.share(len(batch)))
            ]
            found = Grades(grading.submit(own), len(batch)).result()
            if file:
                lines = [json.dumps([one.id, *grade]) for (one, *_), grade in zip(batch, found, strict=True)]
                file.write("".join(f"{line}\n" for line in lines).encode())
            bar.update(len(batch))


def _lines(path: Path) -> Iterator[tuple[str, int]]:
    """Yields the completion id and the byte offset of each line."""
    place = 0
    with path.open("rb") as file:
        for line in file:
            try:
                name, *grade = json.loads(line)
                Grade(*grade)
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{path}: not the grades that this run wrote ({error}); restore the file from a copy"
                ) from error
            yield name, place
            place += len(line)
