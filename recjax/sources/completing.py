"""Completes the batch of a step: stored groups join it, and log-probs that completions lack are computed."""

from recjax.experience.group import Group
from recjax.sources.drawing import groups_at
from recjax.sources.setup import Setup
from recjax.store.missing_logprobs import with_logprobs
from recjax.training import schedule
from recjax.training.learner import Learner
from recjax.training.run import State


def complete_batch(setup: Setup, learner: Learner, state: State, groups: list[Group], step: int) -> list[Group]:
    """The groups from the queue, then those of the store, which depend only on the step.

    With `missing_logprobs: current`, the policy scores them here, before their first update, and not when they arrive:
    a group may wait for many updates.

    Args:
        learner: has the parameters that score completions without log-probs.
    """
    config = setup.config
    stored_count = config.stored_groups
    if stored_count:
        # Stored groups skip the queue: their rewards are known, and the checkpoint need not hold them.
        batch = schedule.batch_of(step, config.training.updates)
        with setup.phases.phase("sample"):
            assert setup.stored is not None
            groups = groups + groups_at(setup.stored.groups, stored_count, batch, config.seed)
    if config.experience is None or config.experience.missing_logprobs != "current":
        return groups
    with setup.phases.phase("sample"):
        params = learner.current_params(state)
        setup.phases.device.call()
        groups = with_logprobs(
            groups,
            shape=setup.shape,
            policy=setup.policy,
            params=params,
            sampling=config.rollout.sampling(),
            chunk=config.model.logprob_chunk,
        )
        setup.phases.device.end()
    return groups
