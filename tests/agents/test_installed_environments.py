"""Environments of the packages verifiers and gymnasium as tasks: their problems, turns, rewards and refusals."""

import importlib.util
import json
import sys
import textwrap
from types import SimpleNamespace

import pytest

from recjax.agents.agent_grades import AgentGrader
from recjax.agents.agent_server import call_key, chat_completion, with_sampled_text
from recjax.agents.trials import Trial
from recjax.config import load_config
from recjax.config.tasks import GymnasiumTask, VerifiersTask
from recjax.errors import UserError
from recjax.experience.group import Completion
from recjax.hub.tokenizers import character_tokenizer
from recjax.models.sampling import Sampling
from recjax.tasks.gymnasium_environments import TextEnvironment, gymnasium_problems
from recjax.tasks.loading import load_problems
from recjax.tasks.verifiers_environments import open_verifiers
from tests.training.tiny_run import TINY, train

LAKE = {"name": "FrozenLake-v1", "options": {"is_slippery": True}, "actions": ["L", "D", "R", "U"]}
needs_gymnasium = pytest.mark.skipif(not importlib.util.find_spec("gymnasium"), reason="gymnasium is not installed")
needs_tasksets = pytest.mark.skipif(
    not importlib.util.find_spec("verifiers") or importlib.util.find_spec("verifiers.envs") is not None,
    reason="verifiers from 0.4 is not installed",
)

TASKSET = """
import verifiers.v1 as vf

class Letters(vf.Task[vf.TaskData]):
    @vf.reward(weight=0.5)
    async def vowels(self, trace: vf.Trace) -> float:
        return float(sum(letter in "aeiou0123" for letter in trace.last_reply))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return 7.0

class Words(vf.Taskset[Letters, vf.TasksetConfig]):
    def load(self):
        for number in range(COUNT):
            yield Letters(vf.TaskData(prompt=f"word {number}"), self.config.task)

class Talk(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn()
            await interaction.turn("more")

__all__ = ["Words", "Talk"]
"""


def config_of(tmp_path, *overrides):
    (tmp_path / "tiny.yaml").write_text(TINY)
    replaced = [
        "task.arithmetic=null",
        "task.reward=null",
        "rollout.max_context_tokens=96",
        f"output={tmp_path / 'run'}",
    ]
    return load_config(tmp_path / "tiny.yaml", [*replaced, *overrides])


@pytest.mark.parametrize("name", ["verifiers", "gymnasium"])
def test_environments_score_alone_is_the_reward(tmp_path, name):
    config = config_of(tmp_path, f"task.{name}=some-name", "task.reward_weights={format: 0.5}")
    assert config.task.agent == name
    policy = SimpleNamespace(rewarded=None, rewards={})
    returned = {"score": 0.25, "format": 1.0, "length_": 9.0}
    completion = Completion(id="", source="", text="", rows=(), sampling=Sampling(), policy_version=0, truncated=False)
    (grade,) = AgentGrader(config).grades([Trial(policy, returned, None, "", "")], [completion], {}, [])
    assert grade.reward == 0.25 + 0.5 * 1.0
    assert returned.items() <= grade.reward_parts.items()


def test_replies_with_calls_sent_back_keep_their_text():
    text = 'so <tool_call>{"name":"add",  "arguments":{"a":1}}</tool_call>'
    reply = SimpleNamespace(text=text, answer=text, truncated=False, prompt_tokens=[1], tokens=[2])
    message = chat_completion(reply, "policy", has_tools=True)["choices"][0]["message"]
    assert message["tool_calls"] and message["content"] == "so"
    written = {call_key(message): text}
    asked = [{"role": "user", "content": "?"}, message, {"role": "tool", "content": "1"}]
    kept = with_sampled_text(json.loads(json.dumps(asked)), written)
    assert kept == [asked[0], {"role": "assistant", "content": text}, asked[2]]
    for edited in ({**message, "content": "no"}, {**message, "tool_calls": message["tool_calls"] * 2}):
        assert with_sampled_text([edited], written) == [edited]


# --- gymnasium.


@needs_gymnasium
def test_games_of_a_seed_are_gymnasiums_own():
    import gymnasium

    for problem in gymnasium_problems(GymnasiumTask(**LAKE, prompt="Cross the lake.\n"), 4, seed=3):
        assert problem.prompt.startswith("Cross the lake.\n[S]FFF\n")
        direct = gymnasium.make("FrozenLake-v1", is_slippery=True)
        direct.reset(seed=problem.columns["environment_row"])
        game = TextEnvironment(GymnasiumTask(**LAKE), problem.columns["environment_row"])
        assert game.reset(seed=5)[0] is None
        for reply in ["R", "go down: D", "no L but R", "D", "D", "D", "R"]:
            text, reward, *ends, _ = game.step(reply)
            place, expected, *expected_ends, _ = direct.step("LDRU".index(reply[-1]))
            assert (reward, ends) == (expected, expected_ends)
            letters = "".join(text.strip().split("\n")[1:])
            assert letters.index("[") == place
            unread = game.step("?")
            assert "choose one of: l, d, r, u" in unread[0].lower() and unread[1:4] == (0.0, False, False)
            if any(ends):
                break


@needs_gymnasium
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "FrozenLak-v1"}, "FrozenLake"),
        ({"actions": ["L", "D"]}, "has 4 actions"),
        ({"options": {"is_slipery": 1}}, "is_slipery"),
        ({"name": "Pendulum-v1", "options": {}, "actions": []}, "its actions are Box"),
    ],
)
def test_environments_that_are_no_text_are_refused(changed, message):
    with pytest.raises(UserError, match=message):
        TextEnvironment(GymnasiumTask(**{**LAKE, **changed}))


@needs_gymnasium
def test_seeds_with_equal_openings_are_different_problems(tmp_path):
    config = config_of(tmp_path, f"task.gymnasium={json.dumps({**LAKE, 'problems': 8})}", "evaluation.problems=4")
    train_problems, held_out = load_problems(config)
    assert (len(train_problems), len(held_out)) == (8, 4)
    assert len({problem.prompt for problem in train_problems + held_out}) == 1


# --- verifiers.


def test_missing_verifiers_names_its_installation(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install -e "\.\[verifiers\]"'):
        open_verifiers(VerifiersTask(name="missing-for-this-test"), 3)


@pytest.fixture
def tasksets(tmp_path, monkeypatch):
    """A function that writes a module with a taskset."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        sys.modules.pop(name, None)
        return name

    return write


@needs_tasksets
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("no_such_one", None, "there is no module no_such_one"),
        ("empty_one", TASKSET.replace("COUNT", "0"), "data set is empty"),
        ("broken_one", "import no_such_package", "no_such_package"),
        ("unrewarded", TASKSET.replace("COUNT", "9").replace("@vf.reward(weight=0.5)", ""), "has no reward"),
        ("classic_one", "def load_environment(): ...", r'pip install "verifiers<0\.4"'),
    ],
)
def test_wrong_tasksets_are_refused_before_work(tasksets, name, text, message):
    if text is not None:
        tasksets(name, text)
    with pytest.raises(UserError, match=message):
        open_verifiers(VerifiersTask(name=name), 3)


@needs_tasksets
@pytest.mark.slow
def test_rollouts_of_a_taskset_train_and_resume(tasksets, tmp_path, monkeypatch):
    tasksets("talking_words", TASKSET.replace("COUNT", "24"))

    def with_template(characters):
        tokenizer = character_tokenizer(characters)
        tokenizer.chat_template = "{% for m in messages %}[{{ m.content }}<eos>{% endfor %}["
        return tokenizer

    monkeypatch.setattr("recjax.hub.policy.character_tokenizer", with_template)
    alphabet = "abcdefghijklmnopqrstuvwxyz 0123456789["
    common = ["task.verifiers=talking-words", f"model.decoder.characters='{alphabet}'", "task.agent_seconds=900"]
    common += ["evaluation.every=0", "evaluation.problems=4", "training.checkpoint_every=2"]
    whole = train(config_of(tmp_path, *common, "training.steps=4", f"output={tmp_path / 'whole'}"))
    train(config_of(tmp_path, *common, "training.steps=2", f"output={tmp_path / 'parts'}"))
    parts = train(config_of(tmp_path, *common, "training.steps=4", f"output={tmp_path / 'parts'}"))
    for row, resumed in zip(whole[-2:], parts[-2:], strict=True):
        for name in ("reward", "reward/vowels", "loss", "gradient_norm", "ratio/max"):
            assert row[name] == resumed[name]
        assert row["reward"] == pytest.approx(0.5 * row["reward/vowels"])
        assert (row["reward/turns"], row["reward/turns_"], row["reward/rows"]) == (2.0, 7.0, 1.0)
        assert row["ratio/q01"] == pytest.approx(1, abs=1e-5) and row["ratio/max"] == pytest.approx(1, abs=1e-5)
