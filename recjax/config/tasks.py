"""The config blocks `task` and `grading`: problems and their rewards."""

from collections.abc import Iterator
from typing import Any, Literal

from recjax.algorithms.options import did_you_mean
from recjax.config.fields import Bool, ConfigBlock, Float, Int, Place, Refusal, block_of, checked, key
from recjax.tasks.grading.graders import GRADERS
from recjax.tasks.grading.gym_package import check_gym

_SOURCE = "Hub data set, folder with its files, or one file as for task.file"
_HELD_OUT = "null: recjax holds out a third of train, at most 1,024 problems"


class ArithmeticTask(ConfigBlock):
    """Questions with one integer as the answer."""

    problems: list[str] = key(lambda: ["10..99 + 10..99"], "Kinds of problems: A..B op C..D, with op + - or *")
    template: str = key("{a} {op} {b} =", "Prompt")
    examples: Int = key(0, "Solved examples before each question, one a line", ge=0)
    worked: Bool = key(False, "Answers of sums show the columns and carries first: 7+5+0=12;4+8+1=13;132")


class FileTask(ConfigBlock):
    """Problems from your own files: JSON Lines, JSON or Parquet."""

    train: str = key(..., ".jsonl, .ndjson, .json (each also as .gz) or .parquet file of training problems")
    evaluation: str | None = key(None, f"File of held-out problems; {_HELD_OUT}")
    prompt_column: str = key("prompt", "Column of prompts: text, or lists of messages")
    answer_column: str = key("answer", "Column of answers, which the reward compares completions with")
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


def _no_agent(text: str) -> str | None:
    return None if text in ("tools", "environment") or ":" in text else "takes module:function, tools or environment"


class TaskConfig(ConfigBlock):
    """Problems and their rewards. A text in place of the block names a task: task: gsm8k.

    The text replaces the whole block by the task with its defaults; `reasoning_gym:letter_counting` names a generator
    as well.
    """

    arithmetic: ArithmeticTask | None = key(None)
    file: FileTask | None = key(None)
    gsm8k: Gsm8kTask | None = key(None)
    math: MathTask | None = key(None)
    guru_math: GuruMathTask | None = key(None)
    toolace: ToolAceTask | None = key(None)
    reasoning_gym: ReasoningGymTask | None = key(None)
    system_prompt: str | None = key(None, "First message of every chat; null: the task's own, if it has one")
    reward: str | None = key(
        None,
        "Name of a built-in reward, module:function, or model:PATH with a sequence classifier's folder or hub name;"
        " null: the task's own",
    )
    reward_device: Literal["auto", "cpu"] = key(
        "auto", "Device for task.reward = model:PATH; auto: the first accelerator of each process, if it has one"
    )
    reward_weights: dict[str, Float] = key(dict, "Weights of the reward's parts; they replace the reward's own weights")
    reward_seconds: Float | None = key(None, "Time limit of an async reward for one batch; null: no limit", gt=0)
    reward_retries: Int = key(0, "Number of times recjax calls an async reward again after it fails on a batch", ge=0)
    success: Float = key(1.0, "Lowest reward of an accurate completion; ignored if the reward has a part `accuracy`")
    truncated: Literal["train", "mask", "penalize"] = key(
        "train", "Treatment of completions cut at the token limit: train on them, mask them, or penalize them"
    )
    truncated_reward: Float = key(0.0, "Reward of cut completions", needs="task.truncated = penalize")
    overlong_tokens: Int | None = key(
        None,
        "Tokens before the limit over which the reward's part `overlong` falls from 0 to -1; null: no such part",
        excludes="task.agent",
        must="be at most rollout.max_completion_tokens",
        ge=1,
    )
    agent: checked(str, _no_agent) | None = key(
        None,
        "Program that talks to the policy. null: none, one prompt and one completion; module:function: your own"
        " async def agent(problem, policy); tools: the model calls task.tools; environment: it plays task.environment",
    )
    agent_seconds: Float = key(
        60.0, "Time limit of an agent, not counting the time it waits for the policy", needs="task.agent", gt=0
    )
    agent_turns: Int = key(16, "Limit of an agent's replies", needs="task.agent", ge=1)
    agent_failure_reward: Float | None = key(
        None, "Reward of agents that fail; null: recjax drops them", needs="task.agent", ge=-(10**9), le=10**9
    )
    tools: list[Place] = key(
        list,
        "module:function of each tool that the model may call; tools run in grading.workers",
        needs="task.agent = tools",
        required="task.agent = tools",
    )
    tool_seconds: Float = key(10.0, "Time limit of one tool call", needs="task.agent = tools", gt=0)
    environment: Place | None = key(
        None,
        "module:class of the environment, made from a problem, with gymnasium's reset and step",
        needs="task.agent = environment",
        required="task.agent = environment",
    )

    def chosen(self) -> str:
        """The name of the task in this block, one of TASKS."""
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

    def refusals(self, config: "recjax.config.Config") -> Iterator[Refusal]:
        """Refuses an unknown reward, and settings that nothing would read."""
        if self.reasoning_gym:
            check_gym(self.reasoning_gym.name, self.reasoning_gym.options, self.reasoning_gym.template)
        plain = self.arithmetic or (self.reasoning_gym and not self.reasoning_gym.chat)
        problem = "does not apply to plain text prompts, such as the prompts of task.arithmetic; remove it"
        yield plain and self.system_prompt is not None, "task.system_prompt", problem
        is_known = self.reward_name() in GRADERS or ":" in self.reward_name()
        yield not is_known, "task.reward", f"takes module:function, model:PATH, or one of {', '.join(GRADERS)}"
        unread = self.reward_device != "auto" and not self.reward_name().startswith("model:")
        yield unread, "task.reward_device", "applies only with task.reward = model:PATH; set it, or remove this key"


def named_task(value: Any) -> Any:
    """The task block that a text such as "gsm8k" or "reasoning_gym:letter_counting" stands for; other values as given.

    Raises:
        ValueError: the text names no task.
    """
    if not isinstance(value, str):
        return value
    name, colon, generator = value.partition(":")
    if name == "reasoning_gym" and generator:
        return {name: {"name": generator}}
    names = [f"{task}:GENERATOR" if task == "reasoning_gym" else task for task in TASKS]
    if value not in names or colon:
        hint = did_you_mean(value, names) or f"; it takes {', '.join(names)}, or a block"
        raise ValueError(f"names no task{hint}")
    return {name: {}}


# A config has exactly one of these.
TASKS = tuple(name for name, field in TaskConfig.model_fields.items() if block_of(field.annotation))


class GradingConfig(ConfigBlock):
    """Worker processes that run built-in rewards; a completion past a limit gets reward 0 and is counted."""

    workers: Int = key(2, "Worker processes", ge=1)
    seconds: Float = key(5.0, "Time limit for one completion", ge=0.1)
    max_characters: Int = key(50_000, "Limit of a completion's characters; a longer one gets reward 0", ge=1)

    def refusals(self, config: "recjax.config.Config") -> Iterator[Refusal]:
        """Limits for a reward that no worker process computes."""
        applies = config.task.reward_name() in GRADERS or config.task.agent == "tools" or self == GradingConfig()
        problem = f"does not apply to task.reward = {config.task.reward_name()}, which runs in the training process;"
        yield not applies, "grading", f"{problem} remove the block"
