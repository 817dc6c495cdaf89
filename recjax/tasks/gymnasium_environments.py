"""Registered environments of the package gymnasium, played as text (`pip install -e ".[gymnasium]"`).

Problems: problem i is the environment after `reset(seed=…)` with a seed of its own, so all agents of a group play the
same game. Its prompt is `task.gymnasium.prompt` and the first observation.
Observations: text as it is; of other environments their rendering "ansi", in which colored text gets brackets, or else
the observation as Python writes it.
Actions: the reply as it is for a space of texts; for a Discrete space the last action that the reply names, by a word
of `task.gymnasium.actions` or its number. A reply without one changes nothing and counts as a turn.
Reward: the sum of the steps' rewards; each step's is its turn's.
"""

import importlib
import importlib.util
import re
from typing import Any

from recjax.algorithms.options import described
from recjax.config.tasks import GymnasiumTask
from recjax.errors import UserError
from recjax.tasks.problems import PLAYED_ROW, Problem

_INSTALL = 'pip install -e ".[gymnasium]"'
_LIMIT = 1_000_000  # problems per seed of a run
_COLORED = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0?m", re.DOTALL)
_CODE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")


class TextEnvironment:
    """An environment of gymnasium whose observations and actions are texts."""

    def __init__(self, block: GymnasiumTask, seed: int | None = None):
        """Makes the environment.

        Args:
            seed: seed of `reset`; None: the seed that `reset` gets.
        Raises:
            UserError: gymnasium or the environment is missing, or its observations or actions are no text.
        """
        if importlib.util.find_spec("gymnasium") is None:
            raise UserError("task.gymnasium", "needs the package gymnasium", _INSTALL, value=block.name)
        gymnasium: Any = importlib.import_module("gymnasium")
        self._block = block
        self._seed = seed
        options = dict(block.options)
        try:
            spec = gymnasium.spec(block.name)
            if "render_mode" not in options and "ansi" in _render_modes(spec):
                options["render_mode"] = "ansi"
            self._environment = gymnasium.make(block.name, **options)
        except Exception as error:
            raise UserError(
                "task.gymnasium",
                described(error, first_line=True),
                "correct the name or task.gymnasium.options; module:NAME imports a module that registers NAME",
                value=block.name,
            ) from error
        space = self._environment.observation_space
        self._is_text = isinstance(space, gymnasium.spaces.Text)
        self._renders = options.get("render_mode") == "ansi" and not self._is_text
        if isinstance(space, gymnasium.spaces.Box) and len(space.shape) > 1 and not self._renders:
            raise UserError(
                "task.gymnasium.name", f"its observations are arrays, {space}", "wrap it as texts", value=block.name
            )
        # Words of the actions, the number of the first action, and the pattern that finds a word in a reply.
        self._shown, self._first = _action_words(block, self._environment.action_space)
        self._words = [word.lower() for word in self._shown]
        longest_first = sorted(self._words, key=len, reverse=True)
        self._pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")

    def opening(self) -> str:
        """The text of the first observation."""
        observation, _ = self._environment.reset(seed=self._seed)
        return self._text(observation)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[None, dict[str, Any]]:
        """Starts the game of the problem, whose prompt has the first observation."""
        if self._seed is not None:
            seed = self._seed
        _, info = self._environment.reset(seed=seed, options=options)
        return None, _without_parts(info)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Plays a reply; see the module's text."""
        chosen: Any = action
        if self._words:
            found = self._pattern.findall(action.lower())
            if not found:
                return self._after_reply(f"Choose one of: {', '.join(self._shown)}"), 0.0, False, False, {}
            chosen = self._first + self._words.index(found[-1])
        observation, reward, terminated, truncated, info = self._environment.step(chosen)
        text = self._after_reply(self._text(observation))
        return text, float(reward), bool(terminated), bool(truncated), _without_parts(info)

    def close(self) -> None:
        """Closes the environment."""
        self._environment.close()

    def _after_reply(self, text: str) -> str:
        """An observation as plain text, on lines of its own, or as a message."""
        if self._block.chat:
            return text
        return f"\n{text}\n"

    def _text(self, observation: Any) -> str:
        if self._is_text:
            return observation
        if not self._renders:
            if hasattr(observation, "tolist"):
                observation = observation.tolist()
            return str(observation)
        drawn = _COLORED.sub(r"[\1]", str(self._environment.render()))
        return _CODE.sub("", drawn).strip()


def _action_words(block: GymnasiumTask, space: Any) -> tuple[list[str], int]:
    """The words of a Discrete space's actions and the number of its first; no words for a space of texts.

    Raises:
        UserError: the space has other actions, or not one word for each.
    """
    gymnasium: Any = importlib.import_module("gymnasium")
    if isinstance(space, gymnasium.spaces.Text):
        if block.actions:
            raise UserError(
                "task.gymnasium.actions", "the environment takes texts", "remove this key", value=block.actions
            )
        return [], 0
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise UserError(
            "task.gymnasium.name",
            f"its actions are {space}, and a reply is a text or one of a Discrete space",
            "wrap the environment",
            value=block.name,
        )
    first = int(space.start)
    words = list(block.actions)
    if not words:
        words = [str(first + number) for number in range(int(space.n))]
    if len(words) != space.n or len({word.lower() for word in words}) < len(words):
        raise UserError(
            "task.gymnasium.actions",
            f"the environment has {space.n} actions",
            "give each a word of its own",
            value=block.actions,
        )
    return words, first


def _without_parts(info: dict[str, Any]) -> dict[str, Any]:
    """An environment's info without the key that recjax reads as the reward's parts."""
    return {name: value for name, value in info.items() if name != "parts"}


def _render_modes(spec: Any) -> list[str]:
    """The render modes that an environment names in its metadata."""
    gymnasium: Any = importlib.import_module("gymnasium")
    creator = spec.entry_point
    if isinstance(creator, str):
        creator = gymnasium.envs.registration.load_env_creator(creator)
    return getattr(creator, "metadata", {}).get("render_modes", [])


def gymnasium_problems(block: GymnasiumTask, count: int, seed: int) -> list[Problem]:
    """Makes `count` problems, one for each seed from a million times the run's seed.

    Raises:
        UserError: see `TextEnvironment`; or the environment cannot be reset, or begins without a text.
    """
    problems = []
    for number in range(seed * _LIMIT, seed * _LIMIT + count):
        environment = TextEnvironment(block, number)
        try:
            text = environment.opening()
        except Exception as error:
            raise UserError(
                "task.gymnasium", f"reset() failed: {described(error)}", "correct the environment", value=block.name
            ) from error
        finally:
            environment.close()
        opening = f"{block.prompt}{text}"
        if not opening.strip():
            raise UserError(
                "task.gymnasium.prompt", "the first observation is empty", "set a text before it", value=block.prompt
            )
        prompt: Any = f"{opening}\n"
        if block.chat:
            prompt = [{"role": "user", "content": opening}]
        problems.append(Problem(prompt, str(number), columns={PLAYED_ROW: number}))
    return problems
