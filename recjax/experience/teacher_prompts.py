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

    They follow from the groups, so that stored, replayed and resumed groups get the same prompts.
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
        self._room = task.teacher_tokens
        self._policy = policy
        self._judge = Judge(task)
        self._feedback = None
        if task.teacher_feedback:
            self._feedback = user_function("task.teacher_feedback", task.teacher_feedback)
        self._variables = {problem_key(each.prompt, each.answer): each.template for each in problems if each.template}
        self._warned = False
        shortest = [
            self._problem(each.prompt, each.answer, dict.fromkeys(LESSONS, "") | {"answer": each.answer or ""})
            for each in problems
        ]
        spare = config.rollout.max_completion_tokens if "better" in self._names else 0
        lengths = [len(tokens) + spare for tokens in self._encoded(shortest)]
        if max(lengths, default=0) > self._room:
            longest = int(np.argmax(lengths))
            with_better = f", {spare} of them for {{better}}" if spare else ""
            raise UserError(
                "task.teacher_tokens",
                f"the teacher's prompt {shortest[longest].prompt!r:.200} needs {lengths[longest]} tokens{with_better}",
                f"raise it to {lengths[longest]} or more, or shorten task.teacher_template",
                value=self._room,
            )

    def __call__(self, batch: Batch, groups: Sequence[Group]) -> Batch:
        """The batch with a teacher's prompt for each completion of its groups that has one."""
        lessons = []
        for group in groups:
            graded = tuple(each for each in group.completions if each.grade and each.grade.reward is not None)
            # With the rewards that the run trains on, which `task.truncated` may change.
            seen = self._judge.seen(group._replace(completions=graded)).completions
            # The first of equal ones.
            best = max(seen, key=lambda each: cast(float, each.known_grade.reward), default=None)
            as_seen = {completion.id: completion for completion in seen}
            lessons += [self._lesson(group, as_seen.get(each.id, each), best) for each in group.completions]
        texts = [None if lesson is None else problem_text(lesson.prompt, None) for lesson in lessons]
        # Completions of a group often have the same lesson.
        distinct = {text: lesson for text, lesson in zip(texts, lessons, strict=True) if lesson is not None}
        tokens = dict(zip(distinct, self._encoded([*distinct.values()]), strict=True))
        prompts = [tokens.get(text) for text in texts]
        longest = max((len(ids) for ids in tokens.values()), default=0)
        if longest > self._room:
            if not self._warned:
                logger.warning(
                    "task.teacher_tokens = %d: a teacher's prompt has %d tokens; recjax trains on completions with such"
                    " prompts without a teacher, and the metric taught_fraction does not count them",
                    self._room,
                    longest,
                )
            self._warned = True
            prompts = [None if ids is None or len(ids) > self._room else ids for ids in prompts]
        return with_teacher_prompts(batch, row_places(groups, batch.shape), prompts, self._room)

    def _lesson(self, group: Group, completion: Completion, best: Completion | None) -> Problem | None:
        """The teacher's prompt for a completion; None if it lacks a value that the template names."""
        values: dict[str, Any] = {"answer": group.answer, "better": None, "feedback": None}
        reward = None if completion.grade is None else completion.grade.reward
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
            return Problem(self._template.format(**{**values, "prompt": prompt}), "", template=variables)
        users = [index for index, message in enumerate(prompt) if message["role"] == "user"]
        last = users[-1] if users else len(prompt) - 1
        text = self._template.format(**{**values, "prompt": prompt[last]["content"]})
        chat = [*prompt[:last], {**prompt[last], "content": text}, *prompt[last + 1 :]]
        return Problem(chat, "", template=variables)

    def _encoded(self, problems: Sequence[Problem]) -> list[np.ndarray]:
        """Token ids of prompts."""
        try:
            return [ids for _, ids in rendered(problems, 0, self._policy.tokenizer, self._policy.vocabulary)]
        except UserError as error:
            raise error.within("task.teacher_template") from error
