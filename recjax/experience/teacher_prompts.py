"""Prompts of a teacher that reads more than the policy: the answer, a better completion, or feedback."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from recjax.algorithms.options import user_function
from recjax.config import Config
from recjax.config.tasks import LESSONS
from recjax.errors import UserError
from recjax.experience.batch import Batch, row_places, with_teacher_prompts
from recjax.experience.group import Completion, Group
from recjax.experience.replay import Judge
from recjax.hub.policy import Policy
from recjax.tasks.problems import Problem, problem_key, problem_text
from recjax.tasks.prompts import rendered

logger = logging.getLogger(__name__)


class TeacherPrompts:
    """Adds to a batch the prompts that `task.teacher_template` makes for its completions.

    The prompts depend only on the groups, so stored, replayed and resumed groups get the same ones.
    Reference: arXiv 2601.20802 (SDPO), 2601.18734 (OPSD).
    """

    def __init__(self, config: Config, policy: Policy, problems: Sequence[Problem]):
        """Takes the problems that the run trains on, and makes the teacher's prompt of each.

        Raises:
            UserError: the feedback function cannot be imported; or a prompt cannot be encoded, or is too long.
        """
        task = config.task
        assert task.teacher_template is not None and task.teacher_tokens is not None
        self._template = task.teacher_template
        self._names = [name for name in LESSONS if f"{{{name}}}" in task.teacher_template]
        self._capacity = task.teacher_tokens  # The batch has so many tokens for each prompt.
        self._policy = policy
        self._judge = Judge(task)
        self._feedback = None
        if task.teacher_feedback:
            self._feedback = user_function("task.teacher_feedback", task.teacher_feedback)
        self._variables = {}
        for problem in problems:
            if problem.template:
                self._variables[problem_key(problem.prompt, problem.answer)] = problem.template
        self._has_warned = False

        shortest = []
        for problem in problems:
            values = dict.fromkeys(LESSONS, "")
            values["answer"] = problem.answer or ""
            shortest.append(self._problem(problem.prompt, problem.answer, values))
        spare = 0
        with_better = ""
        if "better" in self._names:
            spare = config.rollout.max_completion_tokens
            with_better = f", {spare} of them for {{better}}"
        lengths = [len(tokens) + spare for tokens in self._encoded(shortest)]
        if max(lengths, default=0) > self._capacity:
            longest = int(np.argmax(lengths))
            raise UserError(
                "task.teacher_tokens",
                f"the teacher's prompt {shortest[longest].prompt!r:.200} needs {lengths[longest]} tokens{with_better}",
                f"raise it to {lengths[longest]} or more, or shorten task.teacher_template",
                value=self._capacity,
            )

    def __call__(self, batch: Batch, groups: Sequence[Group]) -> Batch:
        """The batch with the teacher's prompts; a completion without a lesson has no prompt."""
        lessons = []
        for group in groups:
            lessons += self._lessons(group)
        # Completions of a group often have the same lesson, so each text is encoded once.
        texts: list[str | None] = []
        distinct: dict[str | None, Problem] = {}
        for lesson in lessons:
            text = None
            if lesson is not None:
                text = problem_text(lesson.prompt, None)
                distinct[text] = lesson
            texts.append(text)
        tokens = dict(zip(distinct, self._encoded(list(distinct.values())), strict=True))
        prompts = [tokens.get(text) for text in texts]
        longest = max((len(ids) for ids in tokens.values()), default=0)
        if longest > self._capacity:
            if not self._has_warned:
                logger.warning(
                    "task.teacher_tokens = %d: a teacher's prompt has %d tokens; recjax trains on completions with such"
                    " prompts without a teacher, and the metric taught_fraction does not count them",
                    self._capacity,
                    longest,
                )
            self._has_warned = True
            prompts = [ids if ids is not None and len(ids) <= self._capacity else None for ids in prompts]
        return with_teacher_prompts(batch, row_places(groups, batch.shape), prompts, self._capacity)

    def _lessons(self, group: Group) -> list[Problem | None]:
        """The teacher's prompt for each completion of a group; None for a completion without a lesson."""
        graded = []
        for completion in group.completions:
            if completion.grade is not None and completion.grade.reward is not None:
                graded.append(completion)
        # The run trains on the rewards that `Judge.seen` returns, which `task.truncated` may change.
        seen = self._judge.seen(group._replace(completions=tuple(graded))).completions
        # Among equal rewards, the first completion is the best.
        best = max(seen, key=lambda completion: cast(float, completion.known_grade.reward), default=None)
        seen_by_id = {completion.id: completion for completion in seen}
        lessons = []
        for completion in group.completions:
            lessons.append(self._lesson(group, seen_by_id.get(completion.id, completion), best))
        return lessons

    def _lesson(self, group: Group, completion: Completion, best: Completion | None) -> Problem | None:
        """The teacher's prompt for a completion; None if a value that the template names is missing."""
        values: dict[str, Any] = {"answer": group.answer, "better": None, "feedback": None}
        reward = None
        if completion.grade is not None:
            reward = completion.grade.reward
        if best is not None and reward is not None and cast(float, best.known_grade.reward) > reward:
            values["better"] = best.text
        if self._feedback is not None:
            values["feedback"] = self._feedback(group.prompt, completion.text, group.answer)
        elif "comment" in completion.metadata:
            values["feedback"] = completion.metadata["comment"]
        for name in self._names:
            if values[name] is None:
                return None
            if not isinstance(values[name], str):
                raise UserError(
                    f"row {completion.id!r}: {{{name}}}",
                    "task.teacher_template takes texts",
                    "return a text or None",
                    value=values[name],
                )
        return self._problem(group.prompt, group.answer, values)

    def _problem(self, prompt: str | list[dict[str, str]], answer: str | None, values: Mapping[str, Any]) -> Problem:
        """The prompt of the teacher, with the variables that the policy's chat template gets for the problem."""
        variables = self._variables.get(problem_key(prompt, answer), {})
        if isinstance(prompt, str):
            text = self._template.format(**{**values, "prompt": prompt})
            return Problem(text, "", template=variables)
        # The template takes the place of the last message from the user, or of the last message.
        place = len(prompt) - 1
        for index, message in enumerate(prompt):
            if message["role"] == "user":
                place = index
        text = self._template.format(**{**values, "prompt": prompt[place]["content"]})
        chat = list(prompt)
        chat[place] = {**prompt[place], "content": text}
        return Problem(chat, "", template=variables)

    def _encoded(self, problems: Sequence[Problem]) -> list[np.ndarray]:
        """Token ids of prompts."""
        try:
            return [ids for _, ids in rendered(problems, 0, self._policy.tokenizer, self._policy.vocabulary)]
        except UserError as error:
            raise error.within("task.teacher_template") from error
