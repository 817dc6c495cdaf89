"""Environments of the package verifiers, of Prime Intellect (`pip install -e ".[verifiers]"`).

The package has two generations of environments. recjax takes both, each with the versions of verifiers that have it:

- a *taskset* (verifiers from 0.4): the package exports a `Taskset`, perhaps an `Env` that plays it with several turns;
- `load_environment` (verifiers below 0.4): the package returns a SingleTurnEnv, MultiTurnEnv, ToolEnv or another.

Problems: the environment's data set, in its order. Its evaluation set, if it has one, is held out.
Replies: the environment's own client asks the address of the agent's policy, which records each reply with its tokens.
Reward: the environment's total, as the part score; its single rewards and metrics are parts of weight 0.
"""

import contextlib
import functools
import importlib
import importlib.util
import json
from collections.abc import AsyncIterator, Mapping
from types import ModuleType
from typing import Any, Protocol

from recjax.algorithms.options import described
from recjax.config.tasks import VerifiersTask
from recjax.errors import UserError
from recjax.rewards.reward import SCORE, SHAPING
from recjax.tasks.problems import PLAYED_ROW, Problem, check_last_message, checked_messages

_INSTALL = 'pip install -e ".[verifiers]"'
_MODEL = "policy"  # the name of the model in the environment's requests


class Addressed(Protocol):
    """The policy of an agent, see `recjax.agents.agent_policy.AgentPolicy`.

    base_url, api_key: the address for an OpenAI client, and its key.
    """

    @property
    def base_url(self) -> str:
        """The address."""

    @property
    def api_key(self) -> str:
        """The key."""


class VerifiersEnvironment(Protocol):
    """An environment of either generation."""

    def problems(self) -> tuple[list[Problem], list[Problem]]:
        """Its train problems, and its evaluation problems, which may be none."""
        ...

    def serving(self) -> contextlib.AbstractAsyncContextManager:
        """A context that holds what the rollouts of a batch share, such as servers of tools."""
        ...

    async def play(self, problem: Problem, policy: Addressed) -> dict[str, float]:
        """Plays one rollout of a problem; returns the reward's parts.

        Raises:
            RuntimeError: the rollout failed.
        """
        ...


def open_verifiers(block: VerifiersTask, turns: int) -> VerifiersEnvironment:
    """Loads an installed environment, once in a process for equal arguments.

    Args:
        turns: largest number of replies in a rollout.
    Raises:
        UserError: verifiers or the environment is not installed or cannot be loaded, or it has no reward.
    """
    return _opened(json.dumps(block.model_dump(), sort_keys=True), turns)


@functools.lru_cache(maxsize=4)
def _opened(block_text: str, turns: int) -> VerifiersEnvironment:
    block = VerifiersTask(**json.loads(block_text))
    if importlib.util.find_spec("verifiers") is None:
        raise UserError("task.verifiers", "needs the package verifiers", _INSTALL, value=block.name)
    has_tasksets = importlib.util.find_spec("verifiers.envs") is None
    module = _imported(block.name)
    if not hasattr(module, "load_environment"):
        if not has_tasksets:
            raise UserError(
                "task.verifiers.name",
                f"the package {module.__name__} has no load_environment, which environments of this version have",
                'if it is a taskset, pip install "verifiers>=0.4"',
                value=block.name,
            )
        return _loaded(block, functools.partial(TasksetEnvironment, block, turns))
    if has_tasksets:
        raise UserError(
            "task.verifiers.name",
            "the package has load_environment, and the installed verifiers takes tasksets only",
            'pip install "verifiers<0.4"',
            value=block.name,
        )
    return _loaded(block, functools.partial(ClassicEnvironment, block, turns))


def _imported(name: str) -> ModuleType:
    """The module of an environment: owner/my-name@version is the module my_name, as verifiers reads it."""
    module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    for place in (f"verifiers.v1.tasksets.{module}", module):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if place.startswith(f"{error.name}.") or place == error.name:
                continue
            raise UserError("task.verifiers.name", described(error), "install it", value=name) from error
        except (Exception, SystemExit) as error:
            raise UserError("task.verifiers.name", described(error), "correct the environment", value=name) from error
    raise UserError(
        "task.verifiers.name",
        f"there is no module {module}",
        "install the environment's package, or start in the folder that holds it",
        value=name,
    )


def _loaded(block: VerifiersTask, load: Any) -> VerifiersEnvironment:
    """Runs the environment's own code that loads it, whose errors are the user's."""
    try:
        return load()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(
            "task.verifiers",
            f"the environment cannot be loaded: {described(error)}",
            "correct task.verifiers.options or the environment",
            value=block.name,
        ) from error


def _checked_problems(name: str, problems: list[Problem]) -> list[Problem]:
    if not problems:
        raise UserError("task.verifiers", "the environment's data set is empty", "check its options", value=name)
    return problems


def _problem(location: str, prompt: Any, answer: Any, row: str) -> Problem:
    """A problem whose prompt has text alone; answers that are no text stay with the environment."""
    if not isinstance(prompt, str):
        prompt = checked_messages(prompt, location)
        check_last_message(prompt, location)
    if not isinstance(answer, str):
        answer = ""
    return Problem(prompt, answer, columns={PLAYED_ROW: row})


def _parts(total: float, named: Mapping[str, Any]) -> dict[str, float]:
    """The parts of a reward: the total as score, and its named numbers; names of recjax get an underscore."""
    parts = {SCORE: float(total)}
    for name, value in named.items():
        if not isinstance(value, int | float):
            continue
        if name == SCORE or name in SHAPING:
            name = f"{name}_"
        parts[name] = float(value)
    return parts


class ClassicEnvironment:
    """An environment with `load_environment`, of verifiers below 0.4."""

    def __init__(self, block: VerifiersTask, turns: int):
        """Loads it; see `open_verifiers`."""
        verifiers: Any = importlib.import_module("verifiers")
        self._name = block.name
        self._most = block.problems
        self._environment = verifiers.load_environment(block.name.split("@", 1)[0], **block.options)
        rubric = self._environment.rubric
        names = rubric._get_reward_func_names()
        if not any(rubric._get_reward_weights()):
            raise UserError(
                "task.verifiers",
                f"the environment has no reward: its rubric's functions are {', '.join(names) or 'none'}",
                "give it a Rubric with a function of weight above 0",
                value=block.name,
            )
        if self._environment.requires_group_rollouts:
            raise UserError(
                "task.verifiers",
                "the environment's rubric compares the rollouts of a group, and recjax scores each alone",
                "remove such reward functions",
                value=block.name,
            )
        limit = getattr(self._environment, "max_turns", None)
        if limit is not None and not 0 < limit <= turns:
            self._environment.max_turns = turns
        self._rows: dict[str, dict[str, Any]] = {}

    def problems(self) -> tuple[list[Problem], list[Problem]]:
        """The problems of its data set, and of its evaluation set if it has one; see `VerifiersEnvironment`."""
        train = self._split("train", self._environment.get_dataset())
        evaluation = []
        if self._environment.build_eval_dataset() is not None:
            evaluation = self._split("evaluation", self._environment.get_eval_dataset())
        return _checked_problems(self._name, train), evaluation

    def _split(self, split: str, dataset: Any) -> list[Problem]:
        rows = dataset.to_list()[: self._most]
        problems = []
        for number, row in enumerate(rows):
            name = f"{split} {number}"
            self._rows[name] = row
            problems.append(_problem(f"task.verifiers: {name}", row["prompt"], row.get("answer"), name))
        return problems

    def serving(self) -> contextlib.AbstractAsyncContextManager:
        """Rollouts share nothing."""
        return contextlib.nullcontext()

    async def play(self, problem: Problem, policy: Addressed) -> dict[str, float]:
        """Plays one rollout; see `VerifiersEnvironment`."""
        clients: Any = importlib.import_module("verifiers.clients")
        openai: Any = importlib.import_module("openai")
        if not self._rows:
            self.problems()
        row = self._rows[problem.columns[PLAYED_ROW]]
        connection = openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key, max_retries=0, timeout=None)
        async with connection:
            client = clients.OpenAIChatCompletionsClient(connection)
            output = await self._environment.run_rollout(row, client, _MODEL, {})
        error = output.get("error")
        if error is not None:
            raise RuntimeError(f"the environment failed: {error}")
        return _parts(output["reward"], output.get("metrics") or {})


class TasksetEnvironment:
    """A taskset with the `Env` that plays it, of verifiers from 0.4."""

    def __init__(self, block: VerifiersTask, turns: int):
        """Loads it; see `open_verifiers`."""
        vf: Any = importlib.import_module("verifiers.v1")
        settings = dict(block.options)
        settings["taskset"] = {**settings.get("taskset", {}), "id": block.name}
        config_class = vf.env_config_type(block.name, settings.get("id", ""))
        has_harness = vf.default_harness_id(block.name) != "bash"
        roles = {}
        for role, field in config_class.model_fields.items():
            if isinstance(field.default, vf.AgentConfig):
                roles[role] = field.default
        for role, default in roles.items():
            settings[role] = _role_settings(settings.get(role) or {}, default, has_harness, turns)
        self._environment = vf.load_environment(vf.resolve_env_config(settings))
        own = [role for role in roles if getattr(self._environment.config, role).client is None]
        if len(own) > 1:
            raise UserError(
                "task.verifiers.options",
                f"the policy would play the agents {', '.join(own)}, and a rollout trains one",
                "give the others a client and a model, such as {user: {client: {base_url: …}, model: …}}",
                value=block.options,
            )
        self._role = (own or list(roles))[0]
        taskset = self._environment.taskset
        if block.problems is not None:
            taskset = taskset.take(block.problems)
        if not taskset.bounded:
            raise UserError("task.verifiers.problems", "the taskset has no end", "set how many to take", value=None)
        self._tasks = list(taskset)
        self._name = block.name
        if not self._tasks:
            _checked_problems(block.name, [])
        first = self._tasks[0]
        judges_itself = type(self._environment).finalize is not vf.Env.finalize
        if not judges_itself and not first.hooks("reward") and not first.config.judges:
            raise UserError(
                "task.verifiers", "the environment has no reward", "give its Task a @vf.reward", value=block.name
            )
        self._run_null_in_process()

    def _run_null_in_process(self) -> None:
        """Replaces verifiers' program `null`, a process for each rollout, by the same chat loop in this process."""
        environment = self._environment
        role = self._role
        original = environment.setup
        null_harness = importlib.import_module("verifiers.v1.harnesses.null").NullHarness

        async def setup(agents: Any) -> None:
            await original(agents)
            agent = getattr(agents, role)
            if type(agent.harness) is null_harness:
                agent.harness = _chat_harness()(agent.harness.config)

        environment.setup = setup

    def problems(self) -> tuple[list[Problem], list[Problem]]:
        """All tasks, and no evaluation problems; see `VerifiersEnvironment`."""
        problems = []
        for number, task in enumerate(self._tasks):
            location = f"task.verifiers: task {number}"
            problems.append(_problem(location, _opening(task.data, number), None, f"train {number}"))
        return problems, []

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Servers of tools that all rollouts share, and the server that counts and bounds requests.

        Raises:
            UserError: a server of the environment does not start.
        """
        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._environment.serving())
            except Exception as error:
                raise UserError(
                    "task.verifiers",
                    f"the environment's servers do not start: {described(error)}",
                    "correct the environment; verifiers starts its tools as a module of an installed package",
                    value=self._name,
                ) from error
            yield

    async def play(self, problem: Problem, policy: Addressed) -> dict[str, float]:
        """Plays one episode; see `VerifiersEnvironment`."""
        vf: Any = importlib.import_module("verifiers.v1")
        task = self._tasks[int(problem.columns[PLAYED_ROW].rpartition(" ")[2])]
        # verifiers reads the usual key from a variable of the process, which all rollouts would share.
        client = vf.EvalClientConfig(
            base_url=policy.base_url,
            api_key_var="RECJAX_NO_KEY",
            headers={"X-API-Key": policy.api_key},
            timeout={"connect": None},  # this process answers, also while it compiles; agents have their own limit
        )
        episode = await self._environment.run_episode(task, vf.ModelContext(model=_MODEL, client=client))
        traces = [trace for trace in episode.traces if trace.agent.name in (self._role, None)]
        if not episode.ok:
            errors = list(episode.errors)
            for trace in traces:
                errors += trace.errors
            messages = [f"{error.type}: {error.message}" for error in errors]
            raise RuntimeError(f"the environment failed: {'; '.join(messages)}")
        if len(traces) != 1:
            raise RuntimeError(f"the environment ran its agent {len(traces)} times, and one reward is for one run")
        named = {name: value for name, value in traces[0].metrics.items() if value is not None}
        named |= {name: reward.score for name, reward in traces[0].rewards.items() if reward is not None}
        return _parts(traces[0].reward, named)


def _role_settings(given: Mapping[str, Any], default: Any, has_harness: bool, turns: int) -> dict[str, Any]:
    """The settings of an agent: what the user and the environment leave open runs on this machine, as a plain chat."""
    settings = dict(given)
    if "runtime" not in default.model_fields_set:
        settings.setdefault("runtime", {"type": "subprocess"})
    if default.harness is None and not has_harness:
        settings.setdefault("harness", {"id": "null"})
    if default.max_turns is None:
        settings.setdefault("max_turns", turns)
    return settings


def _opening(data: Any, number: int) -> list[dict[str, Any]]:
    """The first messages of a task; a user opens a task without a prompt, so its name stands for it."""
    messages = []
    if data.system_prompt is not None:
        messages.append({"role": "system", "content": data.system_prompt})
    if data.prompt is None:
        messages.append({"role": "user", "content": data.name or f"task {number}"})
    elif isinstance(data.prompt, str):
        messages.append({"role": "user", "content": data.prompt})
    else:
        messages += [message.model_dump(exclude_none=True) for message in data.prompt]
    return messages


@functools.cache
def _chat_harness() -> Any:
    """The class of a harness that chats in this process: it asks for replies and calls tools until none is called."""
    import httpx

    null: Any = importlib.import_module("verifiers.v1.harnesses.null")
    mcp: Any = importlib.import_module("verifiers.v1.harnesses.utils.mcp")
    chat: Any = importlib.import_module("verifiers.v1.dialects.chat")
    runtimes: Any = importlib.import_module("verifiers.v1.runtimes")

    class ChatHarness(null.NullHarness):
        """The chat loop of verifiers' harness `null`, without its process."""

        SUPPORTS_TOOL_INTERCEPTION = False

        async def setup(self, runtime: Any) -> None:
            """Nothing has to be installed."""

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
        ) -> Any:
            """Chats until a reply calls no tool."""
            system, prompt = self.resolve_prompt(data)
            messages = []
            if system:
                messages.append({"role": "system", "content": system})
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            elif prompt is not None:
                messages += [chat.message_to_wire(message) for message in prompt]
            async with contextlib.AsyncExitStack() as stack:
                body = {"model": ctx.model, "messages": messages}
                places = {}
                servers = {}
                if mcp_urls:
                    specs = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
                    body["tools"], places, servers = await mcp.connect_mcp({"mcpServers": specs}, stack)
                client = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
                headers = {"Authorization": f"Bearer {secret}"}
                while True:
                    response = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
                    if response.is_error:
                        raise RuntimeError(f"a request was answered with {response.status_code}: {response.text:.500}")
                    message = response.json()["choices"][0]["message"]
                    calls = message.get("tool_calls") or []
                    written = {"role": "assistant", "content": message.get("content")}
                    if calls:
                        written["tool_calls"] = calls
                    messages.append(written)
                    if not calls:
                        return runtimes.ProgramResult(exit_code=0, stdout="", stderr="")
                    for call in calls:
                        result = await _tool_result(call["function"], mcp, places, servers)
                        name = call["function"]["name"]
                        messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": result})

    return ChatHarness


async def _tool_result(function: Mapping[str, str], mcp: Any, places: Mapping[str, Any], servers: Any) -> Any:
    """A tool's result, or the text of an error for the model."""
    name = function["name"]
    if name not in places:
        return f"error: unknown tool {name!r}"
    return await mcp.call_mcp(servers, places, name, json.loads(function["arguments"]))
