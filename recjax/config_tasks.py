"""The blocks `task` and `grading` of a config: problems and their rewards."""

import dataclasses
import math
from typing import Any, Literal

import omegaconf

from recjax.algorithms.options import require
from recjax.config_fields import at_least, block_of, number, require_defaults, require_one
from recjax.tasks.grading.graders import GRADERS
from recjax.tasks.grading.gym_package import check_gym


@dataclasses.dataclass(frozen=True)
class ArithmeticTask:
    """Questions with one whole number as the answer."""

    # Kinds of problems, as A..B op C..D with op + - or *.
    problems: list[str] = dataclasses.field(default_factory=lambda: ["10..99 + 10..99"])
    template: str = "{a} {op} {b} ="  # the prompt
    examples: int = at_least(0, 0)  # solved examples of the same kinds before each question, one a line
    worked: bool = False  # answers of sums show the columns and carries before the result: 7+5+0=12;4+8+1=13;132


@dataclasses.dataclass(frozen=True)
class FileTask:
    """Problems of the user's own: JSON Lines, JSON or Parquet."""

    train: str = omegaconf.MISSING  # .jsonl, .ndjson, .json (each also as .gz) or .parquet file to train on
    evaluation: str | None = None  # file to evaluate on; null: a third of train, at most 1,024, is held out
    prompt_column: str = "prompt"  # column of prompts: text, or lists of messages
    answer_column: str = "answer"  # the column that the reward compares completions with
    difficulty_column: str | None = None  # column of a label; evaluation reports accuracy for each label
    chat: bool = False  # put text prompts through the model's chat template, as lists of messages always are


@dataclasses.dataclass(frozen=True)
class Gsm8kTask:
    """GSM8K: word problems with a number as the answer."""

    # Hub data set, a folder with its files, or one file, as task.file takes them.
    train: str = "openai/gsm8k"
    evaluation: str | None = "openai/gsm8k"  # as train; null: a third of train, at most 1,024, is held out


@dataclasses.dataclass(frozen=True)
class MathTask:
    """MATH: competition problems; evaluated on MATH-500."""

    # Hub data set, a folder with its files, or one file, as task.file takes them.
    train: str = "DigitalLearningGmbH/MATH-lighteval"
    # As train; null: a third of train, at most 1,024, is held out.
    evaluation: str | None = "HuggingFaceH4/MATH-500"


@dataclasses.dataclass(frozen=True)
class GuruMathTask:
    """Guru-Math: the mathematics part of Guru."""

    # Hub data set, a folder with its files, or one file, as task.file takes them.
    train: str = "LLM360/guru-RL-92k"
    evaluation: str | None = "LLM360/guru-RL-92k"  # as train; null: a third of train, at most 1,024, is held out


@dataclasses.dataclass(frozen=True)
class ToolAceTask:
    """ToolACE: every turn of a conversation in which the assistant calls functions."""

    # Hub data set, a folder with its files, or one file, as task.file takes them.
    train: str = "Team-ACE/ToolACE"
    evaluation: str | None = None  # as train; null: a third of train, at most 1,024, is held out


@dataclasses.dataclass(frozen=True)
class ReasoningGymTask:
    """Problems of one generator of the package reasoning_gym."""

    name: str = omegaconf.MISSING  # the generator, such as letter_counting
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # options of the generator
    problems: int = at_least(1, 1000)  # problems to train on; half as many more, at most 1,024, are held out
    template: str = "{question}"  # the prompt
    examples: int = at_least(0, 0)  # solved problems of the same generator before each question
    chat: bool = True  # prompts as chats, examples as earlier turns; false: plain text, examples on the lines before


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """What to solve and how answers are rewarded. A text in place of the block names a task: task: gsm8k.

    That text, in a file or as an override, replaces the whole block by the task with its defaults;
    `reasoning_gym:letter_counting` names a generator as well.
    """

    arithmetic: ArithmeticTask | None = None
    file: FileTask | None = None
    gsm8k: Gsm8kTask | None = None
    math: MathTask | None = None
    guru_math: GuruMathTask | None = None
    toolace: ToolAceTask | None = None
    reasoning_gym: ReasoningGymTask | None = None
    system_prompt: str | None = None  # first message of every chat; null: the task's own, if it has one
    reward: str | None = None  # a built-in reward's name, or module:function; null: the task's own
    # Weight of each part of the reward, in place of the reward's own weight.
    reward_weights: dict[str, float] = dataclasses.field(default_factory=dict)
    reward_seconds: float | None = number(None, above=0)  # time limit of an async reward for a batch; null: no limit
    reward_retries: int = at_least(0, 0)  # how often an async reward is asked again if it fails on a batch
    # A completion is accurate if its reward is at least this; a reward with an accuracy part does not read it.
    success: float = 1.0
    truncated: Literal["train", "mask", "penalize"] = "train"  # what happens to completions cut at the token limit
    truncated_reward: float = 0.0  # reward of cut completions with task.truncated: penalize
    # Tokens before the limit, over which the reward's part `overlong` falls from 0 to -1; null: there is no such part.
    overlong_tokens: int | None = at_least(1, None)
    # Who talks to the policy: null, one prompt and one completion; module:function, your own async def agent(problem,
    # policy); tools, which lets the model call task.tools; environment, which plays task.environment.
    agent: str | None = None
    agent_seconds: float = number(60.0, above=0)  # time limit of an agent, without the time it waits for the policy
    agent_turns: int = at_least(1, 16)  # limit of an agent's replies
    agent_failure_reward: float | None = None  # reward of agents that fail; null: they are left out
    tools: list[str] = dataclasses.field(default_factory=list)  # module:function of each tool, run in grading.workers
    tool_seconds: float = number(10.0, above=0)  # time limit of one call of a tool
    # Module:class of task.agent: environment, made of a problem, with gymnasium's reset and step.
    environment: str | None = None

    def chosen(self) -> str:
        """Which of TASKS the block gives."""
        return next(name for name in TASKS if getattr(self, name) is not None)

    def reward_name(self) -> str:
        """The reward that the block names, or its task's own."""
        if self.reward is not None:
            return self.reward
        name = self.chosen()
        if name in ("arithmetic", "file"):
            worked = name == "arithmetic" and self.arithmetic.worked
            return f"recjax.tasks.rewards:{'last_number_match' if worked else 'number_match'}"
        return "tool_calls" if name == "toolace" else name

    def check(self) -> None:
        """Refuses more than one task, an unknown reward, and settings that nothing would read."""
        require_one("task", {name: getattr(self, name) for name in TASKS})
        if self.reasoning_gym:
            check_gym(self.reasoning_gym.name, self.reasoning_gym.options, self.reasoning_gym.template)
        plain = self.arithmetic or (self.reasoning_gym and not self.reasoning_gym.chat)
        remedy = "is not read where prompts are plain text, as those of task.arithmetic are; remove it"
        require(self.system_prompt is None or not plain, "task.system_prompt", self.system_prompt, remedy)
        self._check_agent()
        remedy = f"takes module:function, or one of {', '.join(GRADERS)}"
        require(self.reward_name() in GRADERS or ":" in self.reward_name(), "task.reward", self.reward, remedy)
        for part, weight in self.reward_weights.items():
            remedy = f"the weight of {part} must be a finite number"
            require(math.isfinite(weight), "task.reward_weights", self.reward_weights, remedy)
        remedy = "is read with task.truncated = penalize alone; set that, or remove it"
        read = self.truncated == "penalize" or self.truncated_reward == 0
        require(read, "task.truncated_reward", self.truncated_reward, remedy)

    def _check_agent(self) -> None:
        """Refuses an agent of another form, and what its kind does not read or lacks."""
        kinds = "takes module:function, tools or environment"
        require(self.agent in (None, "tools", "environment") or ":" in self.agent, "task.agent", self.agent, kinds)
        unread = {
            "task.agent": ("agent_seconds", "agent_turns", "agent_failure_reward") if self.agent is None else (),
            "task.agent = tools": ("tool_seconds",) if self.agent != "tools" else (),
            "task.agent = environment": ("environment",) if self.agent != "environment" else (),
        }
        for needed, names in unread.items():
            require_defaults("task", self, names, f"is read with {needed} alone; set that, or remove it")
        remedy = "is read with task.agent = tools alone; set that, or remove it"
        require(self.agent == "tools" or not self.tools, "task.tools", self.tools, remedy)
        remedy = "needs the functions that the model may call: task.tools=['module:function', …]"
        require(self.agent != "tools" or bool(self.tools), "task.agent", self.agent, remedy)
        remedy = "needs the environment to play: task.environment=module:class"
        require(self.agent != "environment" or self.environment is not None, "task.agent", self.agent, remedy)
        for name in [*self.tools, *filter(None, [self.environment])]:
            require(":" in name, "task.tools or task.environment", name, "takes module:name")
        bounded = self.agent_failure_reward is None or abs(self.agent_failure_reward) <= 1e9
        require(bounded, "task.agent_failure_reward", self.agent_failure_reward, "takes at most 1e9 either way")


# Of which a config has exactly one.
TASKS = tuple(field.name for field in dataclasses.fields(TaskConfig) if block_of(field.type))


@dataclasses.dataclass(frozen=True)
class GradingConfig:
    """Worker processes, in which built-in rewards grade; a completion past a limit gets reward 0 and is counted."""

    workers: int = at_least(1, 2)  # worker processes
    seconds: float = at_least(0.1, 5.0)  # time limit for one completion
    max_characters: int = at_least(1, 50_000)  # limit of a completion's characters; a longer one gets reward 0

    def check(self, task: TaskConfig) -> None:
        """Refuses limits for a reward that no worker process computes."""
        reward = task.reward_name()
        remedy = f"is not read by task.reward = {reward}, which runs in the training process; remove the block"
        read = reward in GRADERS or task.agent == "tools"
        require(read or self == GradingConfig(), "grading", self, remedy)
