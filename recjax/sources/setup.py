"""Everything that a run has read before its first step: `Setup`."""

from collections.abc import Sequence
from typing import NamedTuple

from recjax.agents.agents import Agents
from recjax.agents.trials import AGENT_FAILURES
from recjax.config import Config
from recjax.experience.batch import Shape, sampled_shape
from recjax.experience.group import Group
from recjax.experience.queue import Settings, settings_of
from recjax.experience.replay import Judge
from recjax.experience.teacher_prompts import TeacherPrompts
from recjax.hub.policy import Policy
from recjax.models.placement import row_shards
from recjax.rewards.pool import Grading
from recjax.runtime.clocks import PhaseSeconds
from recjax.sources.sampling import BatchSampler
from recjax.store.stored import Stored
from recjax.store.stored_groups import ByPrompt
from recjax.tasks.prompts import Prompts


class Demonstrations(NamedTuple):
    """Tokenized chats, one completion each: chats to train on, and chats for the held-out loss.

    shape: shape of the batches.
    digest: checksum of all tokens and masks.
    """

    train: list[Group]
    held_out: list[Group]
    shape: Shape
    digest: str


class Setup(NamedTuple):
    """Everything that a run reads before its first step.

    train, held_out: prompts to train on, and to evaluate on.
    grading: workers that grade completions; open during the run.
    phases: the clock of the phases.
    stored: groups of the store that the run trains on.
    others: completions of a store that join the policy's groups, by prompt.
    demonstrations: chats that the warm start trains on.
    agents: programs that talk to the policy; open during the run.
    judge: how the updates read the rewards of a group.
    teacher_prompts: makes the prompts of `task.teacher_template`; None if the config has none.
    """

    config: Config
    policy: Policy
    train: Prompts
    held_out: Prompts
    grading: Grading
    phases: PhaseSeconds
    stored: Stored | None = None
    others: ByPrompt | None = None
    demonstrations: Demonstrations | None = None
    agents: Agents | None = None
    judge: Judge = Judge()
    teacher_prompts: TeacherPrompts | None = None

    @property
    def sampler(self) -> BatchSampler:
        """Samples batches of the train prompts in this process."""
        return BatchSampler(
            config=self.config,
            policy=self.policy,
            prompts=self.train,
            grading=self.grading,
            phases=self.phases,
            agents=self.agents,
        )

    @property
    def shape(self) -> Shape:
        """The shape of the batches, without rows that only fill micro-batches."""
        return batch_shape(self.config, self.train, self.stored)

    @property
    def padded_shape(self) -> Shape:
        """The shape of the batches with equal shares for micro-batches and devices."""
        minibatches = self.config.training.minibatches
        shards = row_shards()
        shape = self.shape
        micro_batches = self.config.micro_batches(shape.positions // minibatches, shards)
        multiple = micro_batches * shards * minibatches
        prompts = -(-shape.prompts // multiple) * multiple  # rounded up
        return shape._replace(prompts=prompts)

    @property
    def settings(self) -> Settings:
        """The settings of the queue."""
        return settings_of(self.config)._replace(judge=self.judge)

    @property
    def failures(self) -> dict[str, Sequence[str]]:
        """Reasons for which completions of this run can stay without a reward, by the first part of their metric."""
        failures: dict[str, Sequence[str]] = {}
        if self.config.samples_training_data:
            failures["grading"] = self.grading.failures
        if self.agents:
            failures["agent"] = tuple(AGENT_FAILURES)
        return failures


def batch_shape(config: Config, train: Prompts, stored: Stored | None) -> Shape:
    """The batch shape that fits both sampled and stored groups."""
    experience = config.experience
    if experience and experience.store and not experience.follow:
        assert stored is not None
        return stored.shape
    shape = sampled_shape(config, train.tokens.shape[1])
    if stored is None:
        return shape
    other = stored.shape
    assert experience is not None and experience.mix is not None
    if experience.mix.of == "group":
        # The policy's groups already have places for the completions that join them.
        other = other._replace(prompts=1)
        if other.group is not None:
            other = other._replace(group=1)
    if shape.group is None or other.group is None:
        shape = shape.without_groups()
        other = other.without_groups()
        group = None
    else:
        group = max(shape.group, other.group)
    return Shape(
        prompts=max(shape.prompts, other.prompts),
        group=group,
        prompt_time=max(shape.prompt_time, other.prompt_time),
        time=max(shape.time, other.time),
    )
