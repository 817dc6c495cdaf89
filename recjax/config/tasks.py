"""The config blocks `task` and `grading`: problems and their rewards."""

import re
import string
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic

from recjax.algorithms.options import did_you_mean
from recjax.config.fields import (
    Bool,
    ConfigBlock,
    Float,
    Int,
    Place,
    block_of,
    checked,
    key,
    refuse_with,
    refuse_without,
    spelled,
    value_of,
)
from recjax.config.gym import check_gym
from recjax.config.model import POLICY
from recjax.config.parts import OVERLONG, PLAYED, ROWS, TURNS
from recjax.errors import UserError
from recjax.grading.graders import GRADERS

if TYPE_CHECKING:
    from recjax.config.schema import Config

_SOURCE = "Hub data set, or a folder, file or pattern as for task.file"
_SIMPLE = "recjax.tasks.rewards:"
_GRADERS = ", ".join(GRADERS)
_HELD_OUT = "null: recjax holds out a third of train, at most 1,024 problems"


class ArithmeticTask(ConfigBlock):
    """Questions with one integer as the answer."""

    problems: list[str] = key(lambda: ["10..99 + 10..99"], "Kinds of problems: A..B op C..D, with op + - or *")
    template: str = key("{a} {op} {b} =", "Prompt")
    examples: Int = key(0, "Solved examples before each question, one a line", ge=0)
    worked: Bool = key(False, "Answers of sums show the columns and carries first: 7+5+0=12;4+8+1=13;132")


PASSED = "rows"  # in task.file.train: problems that a program passes to recjax.run, which adds their digest
PYTHON = "python:"  # beginning of task.reward for a function that a program passes to recjax.run


class FileTask(ConfigBlock):
    """Problems from your own files: JSON Lines, JSON or Parquet; or from a program."""

    train: str = key(
        PASSED,
        "Training problems: a .jsonl, .ndjson, .json (also as .gz) or .parquet file, a pattern such as data/*.parquet,"
        " or a folder with train*.parquet; rows: the problems that a program passes to recjax.run",
    )
    evaluation: str | None = key(None, f"Held-out problems, as in train; a folder has test*.parquet; {_HELD_OUT}")
    prompt_column: str = key("prompt", "Column of prompts: text, or lists of messages")
    answer_column: str | None = key(
        "answer", "Column of answers, which the reward compares completions with; null: problems have no answers"
    )
    difficulty_column: str | None = key(None, "Column of a label; evaluation reports the accuracy of each label")
    chat: Bool = key(False, "Render text prompts with the model's chat template, as recjax does for lists of messages")


class Gsm8kTask(ConfigBlock):
    """GSM8K: word problems with a number as the answer."""

    train: str = key("openai/gsm8k", _SOURCE)
    evaluation: str | None = key("openai/gsm8k", f"{_SOURCE}; {_HELD_OUT}")


class MathTask(ConfigBlock):
    """MATH: competition problems; evaluated on MATH-500."""

    train: str = key("DigitalLearningGmbH/MATH-lighteval", _SOURCE)
    evaluation: str | None = key("HuggingFaceH4/MATH-500", f"{_SOURCE}; {_HELD_OUT}")


class GuruMathTask(ConfigBlock):
    """Guru-Math: the mathematics part of Guru."""

    train: str = key("LLM360/guru-RL-92k", _SOURCE)
    evaluation: str | None = key("LLM360/guru-RL-92k", f"{_SOURCE}; {_HELD_OUT}")


class ToolAceTask(ConfigBlock):
    """ToolACE: every turn of a conversation in which the assistant calls functions."""

    train: str = key("Team-ACE/ToolACE", _SOURCE)
    evaluation: str | None = key(None, f"{_SOURCE}; {_HELD_OUT}")


class ReasoningGymTask(ConfigBlock):
    """Problems of one generator of the package reasoning_gym."""

    name: str = key(..., "Generator, such as letter_counting")
    options: dict[str, Any] = key(dict, "Options of the generator")
    problems: Int = key(1000, "Training problems; recjax holds out half as many more, at most 1,024", ge=1)
    template: str = key("{question}", "Prompt")
    examples: Int = key(0, "Solved problems of the same generator before each question", ge=0)
    chat: Bool = key(
        True, "Prompts are chats with the examples as earlier turns; false: plain text, one example a line"
    )


class VerifiersTask(ConfigBlock):
    """An installed environment of the package verifiers; the environment gives prompts, turns, tools and rewards."""

    name: str = key(..., "Name of the environment's package, such as my_environment or owner/my-environment")
    options: dict[str, Any] = key(
        dict,
        "Arguments of the environment's load_environment; for a taskset of verifiers 0.4, keys of its config, such as"
        " taskset or agent",
    )
    problems: Int | None = key(None, "Most problems of the data set; null: all", ge=3)


class GymnasiumTask(ConfigBlock):
    """A registered environment of the package gymnasium, as text: each problem is a seed."""

    name: str = key(..., "Name of the environment, such as FrozenLake-v1, or module:NAME to import its module first")
    options: dict[str, Any] = key(dict, "Arguments of gymnasium.make")
    problems: Int = key(1000, "Training problems; recjax holds out half as many more, at most 1,024", ge=1)
    prompt: str = key("", "Text before the first observation")
    actions: list[str] = key(list, "Words for the actions of a Discrete space, in order; empty: their numbers")
    chat: Bool = key(False, "Observations are user messages; false: plain text, one observation after another")


def named_block(value: Any) -> Any:
    """The block that a name stands for, as of a function or an environment; other values as given."""
    if isinstance(value, str):
        return {"name": value}
    return value


INITIAL = "initial"
LESSONS = ("answer", "better", "feedback")  # names in task.teacher_template besides the prompt


def _wrong_with_template(template: str) -> str | None:
    remedy = f"must hold {{prompt}}, and may hold {{{'}, {'.join(LESSONS)}}}, without a width or a conversion"
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        return f"{remedy} ({error})"
    names = set()
    for _, name, form, conversion in parsed:
        if name is None:
            continue
        if form or conversion:
            return remedy
        names.add(name)
    if "prompt" in names and names.issubset(["prompt", *LESSONS]):
        return None
    return remedy


class OneTask(ConfigBlock):
    """Problems of one kind and their reward."""

    arithmetic: ArithmeticTask | None = key(None)
    file: FileTask | None = key(None)
    gsm8k: Gsm8kTask | None = key(None)
    math: MathTask | None = key(None)
    guru_math: GuruMathTask | None = key(None)
    toolace: ToolAceTask | None = key(None)
    reasoning_gym: ReasoningGymTask | None = key(None)
    verifiers: Annotated[VerifiersTask | None, pydantic.BeforeValidator(named_block)] = key(None)
    gymnasium: Annotated[GymnasiumTask | None, pydantic.BeforeValidator(named_block)] = key(None)
    system_prompt: str | None = key(
        None, "First message of every chat; null: the task's own, if it has one", note="Not with task.mixture."
    )
    reward: str | None = key(
        None,
        "Name of a built-in reward, module:function, or model:PATH with a sequence classifier's folder or hub name;"
        " null: the task's own",
        note="Not with task.mixture.",
    )
    reward_device: Literal["auto", "cpu"] = key(
        "auto",
        "Device for task.reward = model:PATH; auto: the first accelerator of each process, if it has one",
        note="Not with task.mixture.",
    )
    reward_weights: dict[str, Float] = key(
        dict, "Weights of the reward's parts; they replace the reward's own weights", note="Not with task.mixture."
    )
    reward_seconds: Float | None = key(
        None,
        "Time limit of an async reward for one batch; null: no limit",
        note="Not with task.mixture.",
        gt=0,
        may_change=True,
    )
    reward_retries: Int = key(
        0,
        "Number of times recjax calls an async reward again after it fails on a batch",
        note="Not with task.mixture.",
        ge=0,
        may_change=True,
    )
    success: Float = key(
        1.0,
        "Lowest unweighted score of an accurate completion; ignored with a part `accuracy`",
        note="Not with task.mixture.",
    )
    verdict: str | None = key(
        None,
        "Part of the reward that says whether an answer is right, with task.success or more; null: `accuracy`, or else"
        " `score`, or else the only part. Several other parts have no accuracy",
        note="Not with task.mixture.",
    )

    def chosen(self) -> str:
        """The name of the task in this block, one of TASKS."""
        return next(name for name in TASKS if getattr(self, name) is not None)

    def reward_name(self) -> str:
        """The reward that the block names, or its task's own."""
        if self.reward is not None:
            return self.reward
        name = self.chosen()
        if name == "arithmetic" and self.arithmetic is not None and self.arithmetic.worked:
            return f"{_SIMPLE}last_number_match"
        if name in ("arithmetic", "file"):
            return f"{_SIMPLE}number_match"
        if name in PLAYED:
            return f"{_SIMPLE}exact_match"  # never asked, because the environment grades
        if name == "toolace":
            return "tool_calls"
        return name

    def check_task(self, block_key: str, by_agent: bool) -> None:
        """Refuses an unknown reward, and settings without effect.

        Args:
            block_key: the block's dotted key.
            by_agent: True if an agent may give the rewards itself.
        Raises:
            UserError: a contradiction within the block.
        """
        gym = self.reasoning_gym
        if gym is not None:
            check_gym(gym.name, gym.options, gym.template)
        has_plain_prompts = self.arithmetic is not None or (gym is not None and not gym.chat)
        if has_plain_prompts and self.system_prompt is not None:
            raise UserError(
                f"{block_key}.system_prompt",
                "does not apply to plain text prompts, such as the prompts of task.arithmetic",
                "remove it",
                value=self.system_prompt,
            )
        name = self.reward_name()
        if name not in GRADERS and ":" not in name:
            raise UserError(
                f"{block_key}.reward", f"takes module:function, model:PATH, or one of {_GRADERS}", value=self.reward
            )
        if self.reward_device != "auto" and not name.startswith("model:"):
            raise UserError(
                f"{block_key}.reward_device",
                "applies only with task.reward = model:PATH",
                "set it, or remove this key",
                value=self.reward_device,
            )
        if self.file is None:
            return
        if self.file.train == PASSED:  # recjax.run adds the problems, and perhaps a reward
            if block_key != "task":
                raise UserError(
                    f"{block_key}.file.train", "takes a file: recjax.run adds no rows to a mixture", value=PASSED
                )
            return
        compares = (name in GRADERS or name.startswith(_SIMPLE)) and not by_agent
        if compares and not self.file.answer_column:
            raise UserError(
                f"{block_key}.file.answer_column",
                f"the reward {name} compares completions with answers",
                "name their column, or a reward of your own",
                value=self.file.answer_column,
            )


class MixedTask(OneTask):
    """A task of a mixture."""

    weight: Float = key(1.0, "Share of a batch's prompts, relative to the other weights; 0: only evaluated", ge=0)

    @classmethod
    def read(cls, value: Any) -> "MixedTask":
        """Reads a block, whose errors name keys without the mixture's name."""
        if not isinstance(value, Mapping):
            raise UserError(problem="takes a block with a task, such as {gsm8k: {}, weight: 2}")
        for name in value:
            if name in TaskConfig.model_fields and name not in cls.model_fields:
                raise UserError(problem=f"{name} is a key of all tasks of a mixture", remedy=f"set task.{name} instead")
        return cls(**value)


class KeepConfig(ConfigBlock):
    """Training problems to keep, by pass rate: the share of the initial policy's completions that are accurate."""

    pass_rate: list[Float] = key(lambda: [0.1, 0.9], "[lowest, highest] pass rate of a problem that recjax keeps")
    samples: Int = key(8, "Completions of each problem, which measure its pass rate once", ge=1)

    def check(self, config: "Config") -> None:
        """Refuses bounds that are no two ordered rates."""
        bounds = self.pass_rate
        if len(bounds) != 2 or not 0 <= bounds[0] <= bounds[1] <= 1:
            raise UserError(
                "task.keep.pass_rate", "takes [lowest, highest] with 0 <= lowest <= highest <= 1", value=bounds
            )


class CurriculumConfig(ConfigBlock):
    """Draws problems by learnability p (1 − p), where p is a problem's recent pass rate, 1/2 before its first group.

    A problem whose newest group got no reward gets only the uniform draws.
    """

    uniform: Float = key(0.1, "Share of the draws that is uniform over all problems", ge=0, le=1)
    newest: Float = key(0.5, "Weight of the newest group in a problem's recent pass rate", gt=0, le=1)


AgentName = Annotated[
    str,
    spelled(f"tools|environment|{'|'.join(PLAYED)}|.*:.*", "takes module:function, tools or environment"),
]


def _listed(names: list[str]) -> str:
    """Names in words; "none" for no names."""
    if not names:
        return "none"
    return " and ".join(names)


class TaskConfig(OneTask):
    """Problems and their rewards. A text instead of the block names a task: task: gsm8k.

    The text replaces the whole block by the task with its defaults; `reasoning_gym:letter_counting` names a generator
    as well.
    """

    mixture: dict[str, Annotated[MixedTask, pydantic.BeforeValidator(MixedTask.read)]] | None = key(
        None,
        "Tasks by name: blocks with `weight`, the relative share of a batch's prompts (default 1; 0: only evaluated),"
        " and a task's keys from `arithmetic` to `success`",
    )
    keep: KeepConfig | None = key(None, note="Not with experience.store.")
    curriculum: CurriculumConfig | None = key(
        None, note="Not with regime.mode = async or experience.store or experience.mix."
    )
    truncated: Literal["train", "mask", "penalize"] = key(
        "train", "Treatment of completions cut at the token limit: train on them, mask them, or penalize them"
    )
    truncated_reward: Float = key(0.0, "Reward of cut completions", note="Only with task.truncated = penalize.")
    teacher_template: Annotated[str, checked(_wrong_with_template)] | None = key(
        None,
        "Prompt of model.teacher, with {prompt}, which is a chat's last user message, and what the policy does not see:"
        " {answer}, the reference answer; {better}, the group's best completion if its reward is higher; {feedback}. A"
        " completion that lacks one of them has no teacher",
        note="Only with model.teacher. Not with task.agent or experience.follow or training.tokens_per_micro_batch.",
    )
    teacher_tokens: Int | None = key(
        None,
        "Room for a prompt from task.teacher_template; a completion has no teacher if its {better} or {feedback} is"
        " longer",
        note="Only with task.teacher_template.",
        ge=1,
    )
    teacher_feedback: Place | None = key(
        None,
        "module:function(prompt, completion, answer), which returns the text of {feedback} or null; null: the"
        " completion's comment in its store",
        note="Only with task.teacher_template.",
    )
    overlong_tokens: Int | None = key(
        None,
        "Tokens before the limit over which the reward's part `overlong` falls from 0 to -1; null: no such part",
        note="Not with task.agent. Must be at most rollout.max_completion_tokens.",
        ge=1,
    )
    agent: AgentName | None = key(
        None,
        "Program that talks to the policy. null: one prompt and one completion; module:function: your own"
        " async def agent(problem, policy); tools: the model calls task.tools; environment: it plays task.environment;"
        " verifiers, gymnasium: it plays the environment of this task, which sets the agent",
    )
    agent_seconds: Float = key(
        60.0,
        "Time limit of an agent, not counting the time it waits for the policy",
        note="Only with task.agent.",
        gt=0,
    )
    agent_turns: Int = key(16, "Limit of an agent's replies", note="Only with task.agent.", ge=1)
    agent_failure_reward: Float | None = key(
        None, "Reward of agents that fail; null: recjax drops them", note="Only with task.agent.", ge=-(10**9), le=10**9
    )
    seats: dict[str, Int | str] = key(
        dict,
        "Seats by name, for agents that call policy.seat(name), and who plays them. policy: the policy; initial: the"
        " policy before the first step; N: the policy after the last step that N divides; module:function: a script",
        note="Only with task.agent. Not with task.agent = tools or task.agent = environment or task.keep or"
        " task.curriculum.",
    )
    train_seats: list[str] = key(
        list, "Seats to train on; empty: all seats of the policy", note="Only with task.seats."
    )
    tools: list[Place] = key(
        list,
        "module:function of each tool that the model may call; tools run in grading.workers",
        note="Only with task.agent = tools.",
    )
    tool_seconds: Float = key(10.0, "Time limit of one tool call", note="Only with task.agent = tools.", gt=0)
    environment: Place | None = key(
        None,
        "module:class of the environment, made from a problem, with gymnasium's reset and step",
        note="Only with task.agent = environment.",
    )

    @pydantic.field_validator("mixture")
    @classmethod
    def _check_mixture(cls, tasks: dict[str, MixedTask] | None) -> dict[str, MixedTask] | None:
        if tasks is None:
            return None
        for name, task in tasks.items():
            if not re.fullmatch(r"[\w-]+", name):
                raise UserError(problem=f"the name {name!r} of a task must consist of letters, digits, _ and -")
            chosen = [choice for choice in TASKS if getattr(task, choice) is not None]
            if len(chosen) != 1:
                raise UserError(name, f"give exactly one of {', '.join(TASKS)}", f"found {_listed(chosen)}")
        if not any(task.weight for task in tasks.values()):
            raise UserError(problem="no task has a weight above 0", remedy="raise one")
        return tasks

    @pydantic.model_validator(mode="before")
    @classmethod
    def _expect_problems(cls, values: Any) -> Any:
        """Without a task, a program passes the problems to recjax.run; `load_config` refuses such a file.

        The task of an environment sets the agent that plays it.
        """
        if not isinstance(values, dict):
            return values
        if not any(values.get(name) is not None for name in (*TASKS, "mixture")):
            return values | {"file": FileTask(train=PASSED)}
        for name in PLAYED:
            if values.get(name) is not None and values.get("agent") is None:
                return values | {"agent": name}
        return values

    def tasks(self) -> dict[str, OneTask]:
        """The tasks of the mixture by name, in the names' order; without a mixture, this task with the name ""."""
        if not self.mixture:
            return {"": self}
        return {name: self.mixture[name] for name in sorted(self.mixture)}

    def of(self, name: Any) -> OneTask:
        """The mixture's task of this name; this task without a mixture, and for a value that is no name of a task."""
        if self.mixture and isinstance(name, str) and name in self.mixture:
            return self.mixture[name]
        return self

    def shows_better(self) -> bool:
        """True if the teacher's prompt shows a better completion of the same group."""
        return self.teacher_template is not None and "{better}" in self.teacher_template

    def shares(self) -> dict[str, float]:
        """The expected share of each task in the prompts of a batch."""
        weights = {name: getattr(task, "weight", 1.0) for name, task in self.tasks().items()}
        return {name: weight / sum(weights.values()) for name, weight in weights.items()}

    def chosen(self) -> str:
        """The name of the task, or the names of the mixture's tasks."""
        if not self.mixture:
            return super().chosen()
        return " + ".join(self.tasks())

    def reward_name(self) -> str:
        """The reward of the task, or the rewards of the mixture's tasks."""
        if not self.mixture:
            return super().reward_name()
        return ", ".join(dict.fromkeys(task.reward_name() for task in self.tasks().values()))

    @property
    def trained_seats(self) -> list[str]:
        """The seats to train on; without seats, the agent's only one, with the name ""."""
        if not self.seats:
            return [""]
        if self.train_seats:
            return self.train_seats
        return [name for name, player in self.seats.items() if player == POLICY]

    def seat_version(self, seat: str, version: int) -> int:
        """Optimizer updates of the weights that play a seat, other than a script's.

        Args:
            version: optimizer updates of the sampler's weights.
        """
        player: Any = self.seats.get(seat, POLICY)
        steps: int = {POLICY: 1, INITIAL: version + 1}.get(player, player)
        return version // steps * steps

    def older_versions(self, versions: Iterable[int]) -> set[int]:
        """Versions of frozen weights that play a seat while the sampler's weights have one of `versions`."""
        older: set[int] = set()
        for name, player in self.seats.items():
            if player == INITIAL or isinstance(player, int):
                older.update(self.seat_version(name, version) for version in versions)
        return older

    def most_older_versions(self, steps: int) -> int:
        """The largest number of older versions that play seats in the same batch, in a run with `steps` updates."""
        if not self.seats:
            return 0
        return max(len(self.older_versions([version]) - {version}) for version in range(steps + 1))

    def check(self, config: "Config") -> None:
        """Refuses several tasks, unknown rewards, impossible seats, and settings that have no effect."""
        choices = [f"task.{name}" for name in (*TASKS, "mixture")]
        chosen = [name for name in choices if value_of(config, name) is not None]
        if len(chosen) != 1:
            raise UserError("task", f"give exactly one of {', '.join(choices)}", f"found {_listed(chosen)}")
        if self.mixture:
            names = [name for name in OneTask.model_fields if name not in TASKS]
            refuse_with(config, [f"task.{name}" for name in names], "task.mixture")
        self._check_data(config)
        for name, task in self.tasks().items():
            block_key = "task"
            if name:
                block_key = f"task.mixture.{name}"
            task.check_task(block_key, self.agent is not None)
            for part_name, needed in ((TURNS, "agent"), (ROWS, "agent"), (OVERLONG, "overlong_tokens")):
                if part_name in task.reward_weights and getattr(self, needed) is None:
                    raise UserError(
                        f"{block_key}.reward_weights",
                        f"weighs the part {part_name!r}, which rewards have only with task.{needed}",
                        "set it, or remove the weight",
                        value=task.reward_weights,
                    )
        self._check_teacher(config)
        self._check_agent(config)
        if self.seats:
            self._check_seats(config)
        else:
            refuse_without(config, ["task.train_seats"], "task.seats")

    def _check_data(self, config: "Config") -> None:
        """Refuses ways to choose problems that the run's data does not allow, and a reward that is not read."""
        if self.truncated != "penalize":
            refuse_without(config, ["task.truncated_reward"], "task.truncated = penalize")
        if config.regime.mode == "async":
            refuse_with(config, ["task.curriculum"], "regime.mode = async")
        if config.experience is None:
            return
        if config.experience.store:
            refuse_with(config, ["task.keep", "task.curriculum"], "experience.store")
        if config.experience.mix is not None:
            refuse_with(config, ["task.curriculum"], "experience.mix")

    def _check_teacher(self, config: "Config") -> None:
        """Refuses a prompt of the teacher that this run cannot make, and settings of a prompt that it does not have."""
        template_key = "task.teacher_template"
        if not config.model.teacher:
            refuse_without(config, [template_key], "model.teacher")
        if self.agent:
            refuse_with(config, [template_key], "task.agent")
        if config.follows:
            refuse_with(config, [template_key], "experience.follow")
        if config.training.tokens_per_micro_batch:
            refuse_with(config, [template_key], "training.tokens_per_micro_batch")
        if not self.teacher_template:
            refuse_without(config, ["task.teacher_tokens", "task.teacher_feedback"], template_key)
            return
        if self.teacher_tokens is None:
            raise UserError(
                "task.teacher_tokens",
                f"is required with {template_key}",
                "set it to the room for a prompt from the template",
                value=None,
            )
        if self.teacher_feedback and "{feedback}" not in self.teacher_template:
            raise UserError(
                "task.teacher_feedback",
                "task.teacher_template has no {feedback}",
                "add it there, or remove this key",
                value=self.teacher_feedback,
            )

    def _check_played(self, config: "Config") -> None:
        """Refuses an environment's task with another agent or reward, and an environment's agent without its task."""
        for name in PLAYED:
            block_key = f"task.{name}"
            if getattr(self, name) is None:
                if self.agent == name:
                    raise UserError("task.agent", f"plays {block_key}", f"set {block_key}", value=name)
                continue
            if self.agent != name:
                raise UserError("task.agent", f"{block_key} has its own agent", "remove this key", value=self.agent)
            names = ("task.reward", "task.system_prompt", "task.seats")
            refuse_with(config, names, block_key)
            if config.warm_start is not None and not config.demonstrations:
                raise UserError(
                    "warm_start", f"{block_key} has no answers to show", "remove it, or set warm_start.demonstrations"
                )
        for task_name, task in (self.mixture or {}).items():
            if task.chosen() in PLAYED:
                raise UserError(
                    f"task.mixture.{task_name}.{task.chosen()}",
                    "an environment is no task of a mixture",
                    f"set task.{task.chosen()} in a run of its own",
                )

    def _check_agent(self, config: "Config") -> None:
        """Refuses an agent without its tools or environment, and settings of an agent that this run lacks."""
        self._check_played(config)
        if self.agent:
            refuse_with(config, ["task.overlong_tokens"], "task.agent")
        else:
            names = ["task.agent_seconds", "task.agent_turns", "task.agent_failure_reward", "task.seats"]
            refuse_without(config, names, "task.agent")
        if self.agent != "tools":
            refuse_without(config, ["task.tools", "task.tool_seconds"], "task.agent = tools")
        elif not self.tools:
            raise UserError(
                "task.tools",
                "is required with task.agent = tools",
                "set it: module:function of each tool that the model may call",
                value=self.tools,
            )
        if self.agent != "environment":
            refuse_without(config, ["task.environment"], "task.agent = environment")
        elif self.environment is None:
            raise UserError(
                "task.environment",
                "is required with task.agent = environment",
                "set it: module:class of the environment",
                value=None,
            )
        limit = config.rollout.max_completion_tokens
        if self.overlong_tokens is not None and self.overlong_tokens > limit:
            raise UserError(
                "task.overlong_tokens",
                f"must be at most rollout.max_completion_tokens = {limit}",
                value=self.overlong_tokens,
            )

    def _check_seats(self, config: "Config") -> None:
        """Refuses seats of unknown players, seats that cannot be trained, and runs that seats do not work with."""
        if self.agent in ("tools", "environment", *PLAYED):
            refuse_with(config, ["task.seats"], f"task.agent = {self.agent}")
        if self.keep is not None:
            refuse_with(config, ["task.seats"], "task.keep")
        if self.curriculum is not None:
            refuse_with(config, ["task.seats"], "task.curriculum")
        for name, player in self.seats.items():
            _check_player(f"task.seats.{name}", player, config.training.checkpoint_every)
        trained = self.trained_seats
        if not trained:
            raise UserError(
                "task.seats",
                "the policy plays no seat",
                "set one to policy, or name one in task.train_seats",
                value=self.seats,
            )
        if len(set(trained).intersection(self.seats)) < len(trained):
            raise UserError(
                "task.train_seats",
                f"names seats of task.seats, each once: {', '.join(self.seats)}",
                "remove the others",
                value=self.train_seats,
            )
        players = [self.seats[name] for name in trained]
        if any(":" in str(player) for player in players):
            raise UserError(
                "task.train_seats",
                "a script plays one of them, whose replies have no log-probs",
                "remove it",
                value=self.train_seats,
            )
        if config.sampled_groups % len(trained):
            raise UserError(
                "rollout.prompts_per_step",
                f"must be a multiple of the {len(trained)} seats to train on, each of which has its own groups",
                value=config.rollout.prompts_per_step,
            )
        for name in ("regime.max_staleness", "regime.max_mean_staleness", "experience.replay.max_staleness"):
            if value_of(config, name) is not None and any(player != POLICY for player in players):
                raise UserError(
                    "task.train_seats",
                    f"does not work with {name}, which the frozen weights of such a seat exceed",
                    "remove one of them",
                    value=self.train_seats,
                )


def _check_player(seat_key: str, player: int | str, checkpoint_every: int) -> None:
    """Refuses a player that is neither the policy, nor weights that a checkpoint has, nor a script."""
    if isinstance(player, str):
        is_known = player in (POLICY, INITIAL) or ":" in player
    else:
        is_known = player >= 1
    if not is_known:
        raise UserError(seat_key, "takes policy, initial, a number of steps, or module:function", value=player)
    if isinstance(player, int) and player % checkpoint_every:
        raise UserError(
            seat_key,
            f"must be a multiple of training.checkpoint_every = {checkpoint_every}, as checkpoints have its weights",
            value=player,
        )


# Tasks of a package, and what the text that names one says after the colon.
TASKS_WITH_NAME = {"reasoning_gym": "GENERATOR", "verifiers": "NAME", "gymnasium": "NAME"}


def named_task(value: Any) -> Any:
    """The task block that a text such as "gsm8k" or "reasoning_gym:letter_counting" stands for; other values as given.

    Raises:
        UserError: the text names no task.
    """
    if not isinstance(value, str):
        return value
    name, colon, generator = value.partition(":")
    if name in TASKS_WITH_NAME and generator:
        return {name: {"name": generator}}
    names = [f"{task}:{TASKS_WITH_NAME[task]}" if task in TASKS_WITH_NAME else task for task in TASKS]
    if value not in names or colon:
        hint = did_you_mean(value, names).removeprefix("; ")
        if not hint:
            hint = f"it takes {', '.join(names)}, or a block"
        raise UserError(problem="names no task", remedy=hint)
    return {name: {}}


# Names of the blocks; a task has exactly one.
TASKS = tuple(name for name, field in OneTask.model_fields.items() if block_of(field.annotation))


class GradingConfig(ConfigBlock):
    """Worker processes for built-in rewards and functions that a program passes; past a limit, reward 0, counted."""

    workers: Int = key(2, "Worker processes", ge=1, may_change=True)
    seconds: Float = key(5.0, "Time limit for one completion", ge=0.1)
    max_characters: Int = key(50_000, "Limit of a completion's characters; a longer one gets reward 0", ge=1)
