"""Grades the completions of a store with the reward of the run."""

import dataclasses
import itertools
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from recjax.agents.agent_grades import with_counts
from recjax.agents.trajectory import thoughts_opening
from recjax.errors import UserError
from recjax.experience.group import Completion, Group
from recjax.experience.records import signed_hash
from recjax.logs.metrics import step_bar
from recjax.rewards.custom import Answered, check_signature, needs_answers
from recjax.rewards.reward import MixedReward, part_weights
from recjax.rollout.collecting import Grades
from recjax.runtime import hosts
from recjax.runtime.files import read_sealed, write_sealed
from recjax.sources.setup import Setup
from recjax.store.stored import with_rewards
from recjax.store.stored_groups import ByPrompt, content_of
from recjax.tasks.problems import Problem, question_of

Known = dict[bytes, tuple[str, Problem]]  # rendered prompt and problem of the task, by `content_of`


class _Ungraded(NamedTuple):
    """A stored completion that has no reward of the grader.

    number: number of the completion in the store.
    text: rendered prompt.
    opening: thinking tag that the prompt leaves open, or an empty string.
    """

    number: int
    completion: Completion
    text: str
    problem: Problem
    opening: str


def known_problems(setup: Setup) -> Known:
    """The task's problems; checks that the reward can grade the store's other prompts, which have no columns.

    Raises:
        UserError: a prompt of the store has no known answer or column that its reward needs.
    """
    known = {}
    has_agents = setup.agents is not None  # Agents make prompts of their own, so a problem identifies the group.
    for prompts in (setup.held_out, setup.train):
        rows = zip(prompts.tokens, prompts.mask, prompts.texts, prompts.problems, strict=True)
        for tokens, mask, text, problem in rows:
            group = Group(
                id="", prompt_tokens=tokens[mask], completions=(), prompt=problem.prompt, answer=problem.answer
            )
            known[content_of(group, has_agents)] = (text, problem)
    assert setup.stored is not None
    groups = setup.stored.groups
    known_hashes = [signed_hash(content) for content in known]
    is_known = np.isin(groups.contents(has_agents), known_hashes)
    for group in groups.chosen(~is_known):
        reward = setup.grading.reward
        if isinstance(reward, MixedReward):
            # Grading refuses an unknown task.
            reward = reward.rewards.get(str(group.completions[0].metadata.get("task")))
        if reward is None:
            continue
        if group.answer is None and needs_answers(reward):
            raise UserError(
                "experience.regrade",
                f"group {group.id!r} asks {question_of(group.prompt)!r:.100}, but neither the task nor the store"
                " has an answer to it",
                "import it with its answer, or remove experience.regrade",
            )
        if reward.columns:
            words = f"for experience.regrade, group {group.id!r} of the store, which is no problem of the task, lacks"
            check_signature(reward._replace(columns=()), words)
    return known


def regraded(setup: Setup, known: Known) -> Setup:
    """The setup with the run's own rewards for stored completions, which are computed once and kept in the store.

    Raises:
        UserError: the reward function fails, or the store cannot be written.
    """
    path = Path(setup.config.output) / "grader.json"
    if hosts.is_first() and not path.exists():
        write_sealed(path, {"grader": f"run {uuid.uuid4().hex}"})
    hosts.wait_for_all("the name of a grader")
    grader = read_sealed(path)["grader"]
    _grade(setup, known, grader)
    hosts.wait_for_all("the grades of a store")
    assert setup.stored is not None
    stored = with_rewards(setup.stored, grader, setup.config)
    others = None
    if setup.others:
        others = ByPrompt(stored.groups, setup.agents is not None)
    return setup._replace(stored=stored, others=others)


def _grade(setup: Setup, known: Known, grader: str) -> None:
    """Grades the completions that have no reward of the grader, and adds the rewards to the store."""
    assert setup.stored is not None
    groups = dataclasses.replace(setup.stored.groups, changes=())  # only training needs the changes
    graded = groups.rewards_of(grader)["graded"][groups.places]
    sizes = groups.sizes
    tokenizer = setup.policy.tokenizer
    has_agents = setup.agents is not None
    hosts.wait_for_all("the known grades of a store")

    def ungraded_completions() -> Iterator[_Ungraded]:
        is_lacking = graded < sizes
        lacking_groups = groups.chosen(is_lacking).numbered()
        graded_counts = graded[is_lacking].tolist()
        for (group, numbers), graded_count in zip(lacking_groups, graded_counts, strict=True):
            # Answer and columns come from the task if it has the same prompt; otherwise the answer is the store's.
            found = known.get(content_of(group, has_agents))
            if found is not None:
                text, problem = found
            else:
                text = str(tokenizer.decode(group.prompt_tokens))
                task_name = str(group.completions[0].metadata.get("task", ""))
                problem = Problem(group.prompt, cast(str, group.answer), task=task_name)
            done = {}
            if graded_count:
                done = groups.store.rewards(numbers.tolist(), grader)
            for completion, number in zip(group.completions, numbers.tolist(), strict=True):
                if number not in done:
                    yield _Ungraded(number, completion, text, problem, thoughts_opening(completion, tokenizer))

    ungraded = ungraded_completions()
    task = setup.config.task
    # One batch at a time, as in training.
    size = setup.config.rollout.prompts_per_step * setup.config.rollout.group_size

    def next_batch() -> tuple[list[_Ungraded], Grades] | None:
        """The next completions and their grades, which worker processes compute; None after the last batch."""
        batch = list(itertools.islice(ungraded, size))
        if not batch:
            return None
        answered = []
        for index in hosts.share(len(batch)):
            row = batch[index]
            answered.append(
                Answered.to(
                    row.problem,
                    row.text,
                    completion=row.completion.text,
                    length=row.completion.sampled_tokens,
                    id=row.completion.id,
                    opening=row.opening,
                )
            )
        return batch, Grades(setup.grading.submit(answered), len(batch))

    with setup.grading, step_bar("regrading", int(sizes.sum()), initial=int(graded.sum())) as bar:
        rewards = {}
        written = time.monotonic()
        submitted = next_batch()
        while submitted is not None:
            batch, grades = submitted
            submitted = next_batch()  # the workers grade a batch while the next one is read
            batch_grades = grades.result()
            if hosts.is_first():
                for row, grade in zip(batch, batch_grades, strict=True):
                    if has_agents:
                        own_task = task.of(row.completion.metadata.get("task"))
                        grade = with_counts(grade, row.completion, part_weights(own_task.reward_weights))
                    rewards[row.number] = (grade, None)
                if submitted is None or time.monotonic() - written > 1:  # a killed run repeats a second's grades
                    groups.store.add_rewards(rewards, grader)
                    rewards = {}
                    written = time.monotonic()
            bar.update(len(batch))
