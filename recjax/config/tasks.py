"""The blocks `task` and `grading` of a config: problems and their rewards."""

import math
from typing import Any, Literal

from recjax.algorithms.options import require
from recjax.config.fields import Block, Float, Int, block_of, key, require_defaults, require_one
from recjax.tasks.grading.graders import GRADERS
from recjax.tasks.grading.gym_package import check_gym


class ArithmeticTask(Block):
    """Questions with one whole number as the answer."""

    problems: list[str] = key(lambda: ["10..99 + 10..99"], "Kinds of problems, as A..B op C..D with op + - or *.")
    template: str = key("{a} {op} {b} =", "the prompt")
    examples: Int = key(0, "solved examples of the same kinds before each question, one a line", ge=0)
    worked: bool = key(False, "answers of sums show the columns and carries before the result: 7+5+0=12;4+8+1=13;132")


class FileTask(Block):
    """Problems of the user's own: JSON Lines or Parquet."""

    train: str = key(..., ".jsonl or .parquet file to train on")
    evaluation: str | None = key(None, "file to evaluate on; null: a third of train, at most 1,024, is held out")
    prompt_column: str = key("prompt", "column of prompts: text, or lists of messages")
    answer_column: str = key("answer", "the column that the reward compares completions with")
    difficulty_column: str | None = key(None, "column of a label; evaluation reports accuracy for each label")
    chat: bool = key(False, "put text prompts through the model's chat template, as lists of messages always are")


class Gsm8kTask(Block):
    """GSM8K: word problems with a number as the answer."""

    train: str = key("openai/gsm8k", "Hub data set, a folder with its files, or a .parquet or .jsonl file.")
    evaluation: str | None = key("openai/gsm8k", "as train; null: a third of train, at most 1,024, is held out")


class MathTask(Block):
    """MATH: competition problems; evaluated on MATH-500."""

    train: str = key(
        "DigitalLearningGmbH/MATH-lighteval", "Hub data set, a folder with its files, or a .parquet or .jsonl file."
    )
    evaluation: str | None = key(
        "HuggingFaceH4/MATH-500", "As train; null: a third of train, at most 1,024, is held out."
    )


class GuruMathTask(Block):
    """Guru-Math: the mathematics part of Guru."""

    train: str = key("LLM360/guru-RL-92k", "Hub data set, a folder with its files, or a .parquet or .jsonl file.")
    evaluation: str | None = key("LLM360/guru-RL-92k", "as train; null: a third of train, at most 1,024, is held out")


class ToolAceTask(Block):
    """ToolACE: every turn of a conversation in which the assistant calls functions."""

    train: str = key("Team-ACE/ToolACE", "Hub data set, a folder with its files, or a .parquet or .jsonl file.")
    evaluation: str | None = key(None, "as train; null: a third of train, at most 1,024, is held out")


class ReasoningGymTask(Block):
    """Problems of one generator of the package reasoning_gym."""

    name: str = key(..., "the generator, such as letter_counting")
    options: dict[str, Any] = key(dict, "options of the generator")
    problems: Int = key(1000, "problems to train on; half as many more, at most 1,024, are held out", ge=1)
    template: str = key("{question}", "the prompt")
    examples: Int = key(0, "solved problems of the same generator before each question", ge=0)
    chat: bool = key(
        True, "prompts as chats, examples as earlier turns; false: plain text, examples on the lines before"
    )


class TaskConfig(Block):
    """What to solve and how answers are rewarded. A text in place of the block names a task: task: gsm8k.

    That text, in a file or as an override, replaces the whole block by the task with its defaults;
    `reasoning_gym:letter_counting` names a generator as well.
    """

    arithmetic: ArithmeticTask | None = key(None, "")
    file: FileTask | None = key(None, "")
    gsm8k: Gsm8kTask | None = key(None, "")
    math: MathTask | None = key(None, "")
    guru_math: GuruMathTask | None = key(None, "")
    toolace: ToolAceTask | None = key(None, "")
    reasoning_gym: ReasoningGymTask | None = key(None, "")
    system_prompt: str | None = key(None, "first message of every chat; null: the task's own, if it has one")
    reward: str | None = key(None, "a built-in reward's name, or module:function; null: the task's own")
    reward_weights: dict[str, Float] = key(
        dict, "Weight of each part of the reward, in place of the reward's own weight."
    )
    reward_seconds: Float | None = key(None, "time limit of an async reward for a batch; null: no limit", gt=0)
    reward_retries: Int = key(0, "how often an async reward is asked again if it fails on a batch", ge=0)
    success: Float = key(
        1.0, "A completion is accurate if its reward is at least this; a reward with an accuracy part does not read it."
    )
    truncated: Literal["train", "mask", "penalise"] = key("train", "what happens to completions cut at the token limit")
    truncated_reward: Float = key(0.0, "reward of cut completions with task.truncated: penalise")
    overlong_tokens: Int | None = key(
        None,
        "Tokens before the limit, over which the reward's part `overlong` falls from 0 to -1; null: there is no such part.",
        ge=1,
    )
    agent: str | None = key(
        None,
        "Who talks to the policy: null, one prompt and one completion; module:function, your own async def agent(problem, policy); tools, which lets the model call task.tools; environment, which plays task.environment.",
    )
    agent_seconds: Float = key(60.0, "time limit of an agent, without the time it waits for the policy", gt=0)
    agent_turns: Int = key(16, "limit of an agent's replies", ge=1)
    agent_failure_reward: Float | None = key(None, "reward of agents that fail; null: they are left out")
    tools: list[str] = key(list, "module:function of each tool, run in grading.workers")
    tool_seconds: Float = key(10.0, "time limit of one call of a tool", gt=0)
    environment: str | None = key(
        None, "Module:class of task.agent: environment, made of a problem, with gymnasium's reset and step."
    )

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
        remedy = "is read with task.truncated = penalise alone; set that, or remove it"
        read = self.truncated == "penalise" or self.truncated_reward == 0
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
TASKS = tuple(name for name, field in TaskConfig.model_fields.items() if block_of(field.annotation))


class GradingConfig(Block):
    """Worker processes, in which built-in rewards grade; a completion past a limit gets reward 0 and is counted."""

    workers: Int = key(2, "worker processes", ge=1)
    seconds: Float = key(5.0, "time limit for one completion", ge=0.1)
    max_characters: Int = key(50000, "limit of a completion's characters; a longer one gets reward 0", ge=1)

    def check(self, task: TaskConfig) -> None:
        """Refuses limits for a reward that no worker process computes."""
        reward = task.reward_name()
        remedy = f"is not read by task.reward = {reward}, which runs in the training process; remove the block"
        read = reward in GRADERS or task.agent == "tools"
        require(read or self == GradingConfig(), "grading", self, remedy)
