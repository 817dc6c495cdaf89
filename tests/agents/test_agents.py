"""Agents of a batch: their tokens and log-probs, what one of them does to itself and not to others, their tools."""

import asyncio
import gc
import time
import weakref
from concurrent.futures import Future
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from recjax.agents import agents
from recjax.agents.agent_grades import AgentGrader
from recjax.agents.agent_policy import AgentPolicy, ContextFull, token_ids
from recjax.agents.agents import Agents
from recjax.agents.named_agents import environment_agent
from recjax.agents.tools import Call, Tools, parsed_calls, split_calls
from recjax.agents.trials import AGENT_FAILURES, Trial, root_failure
from recjax.config import load_config
from recjax.experience.batch import Shape, pad
from recjax.experience.group import Completion, Grade, Row, Turn, with_grades
from recjax.experience.layout import Layout, batch_logprobs
from recjax.experience.packing import RowShape, pack
from recjax.experience.queue import Queue, from_plain, to_plain
from recjax.experience.replay import Entry
from recjax.hub.policy import load_params, policy_alone
from recjax.models.placement import on_host, put_rows
from recjax.models.sampling import Sampling
from recjax.models.trainable import with_adapters
from recjax.rewards.pool import Grading
from recjax.rewards.reward import load_reward
from recjax.rollout.collecting import row_keys, sample_groups
from recjax.rollout.engine import Engine
from recjax.rollout.live import LiveEngine
from recjax.rollout.requests import Sampled
from recjax.tasks.problems import Problem
from recjax.tasks.prompts import encode_problems
from recjax.training.evaluation import evaluate_policy, warn_of_ungraded
from tests.agents import some_agents, some_tools
from tests.closeness import assert_same_logprobs
from tests.experience.groups import same_groups
from tests.training.on_mesh import on
from tests.training.tiny_run import TINY

HERE, TOOLS = "tests.agents.some_agents:", "tests.agents.some_tools:"
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
CHATS = (
    "{% if tools %}{{ tools | length }} tools.{% endif %}"
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "[assistant:"
)
SUMS = [Problem("1+2=", "3"), Problem("33+4=", "37")]


@pytest.fixture
def made(tmp_path):
    """A function from (agent, overrides) to a config and a policy with its parameters."""
    (tmp_path / "tiny.yaml").write_text(TINY)

    def make(agent, *overrides):
        name = agent if agent in ("tools", "environment") else HERE + agent
        options = [f"output={tmp_path}", f"task.agent={name}", "rollout.max_context_tokens=90", *overrides]
        config = load_config(tmp_path / "tiny.yaml", options)
        policy = policy_alone(config, CHARACTERS)
        policy.tokenizer.chat_template = CHATS
        return config, policy, load_params(config, policy.decoder.config)

    return make


def sampled(config, policy, params, problems=SUMS, group_size=3, seed=0):
    """Groups and grades."""
    prompts = encode_problems(problems, policy.tokenizer, None)
    reward = load_reward(config.task.reward_name())
    with Grading(config, reward) as grading, Agents(config, policy) as opened:
        names = {"name": "b", "source": "policy", "version": 3}
        options = jax.random.key(seed), group_size, Sampling(), grading
        groups, grades = opened.sample_groups(policy, params, prompts, *options, **names)
        return groups, grades.result()


class Talkative(LiveEngine):
    """An engine's front that replies with the same tokens to everything, and keeps what it was asked."""

    def __init__(self, tokens=(1,)):
        self.asked = []
        self.tokens = np.array([*tokens, 2], np.int32)  # the last one ends the reply

    async def sample(self, request):
        self.asked.append(request.prefix.tolist())
        count = len(self.tokens)
        return Sampled(self.tokens, np.zeros(count, np.float32), np.zeros(count, np.int32), False)


async def replied(asker, asked):
    """A reply, within the time limit that an agent has."""
    async with asyncio.timeout(60) as asker.seats.timeout:
        return await asked


def test_a_rendered_chat_refuses_unknown_tokens(made):
    config, policy, _ = made("one_turn")
    tokenizer, live = policy.tokenizer, Talkative()
    tokenizer.bos_token = "~"
    begin = [("~", tokenizer.bos_token_id)]
    post = tokenizers.processors.TemplateProcessing(single="~ $A", special_tokens=begin)
    tokenizer.backend_tokenizer.post_processor = post
    chat = [{"role": "user", "content": "hi"}]
    asker = AgentPolicy(live, policy, Sampling(), config, np.zeros((9, 2), np.uint32))

    reply = asyncio.run(replied(asker, asker.chat(chat)))
    asyncio.run(replied(asker, asker.chat([*chat, reply.message, *chat])))
    asyncio.run(replied(asker, asker.complete("hi")))
    asyncio.run(replied(asker, asker.complete("[user:ho[assistant:", rendered=True)))
    tokenizer.add_tokens(["<extra>"])
    for ask in (asker.chat([{"role": "user", "content": "<extra>"}]), asker.complete("<extra>")):
        with pytest.raises(ValueError, match="the prompt: token '<extra>' has id .* has an embedding of 97 tokens"):
            asyncio.run(replied(asker, ask))
    rendered = tokenizer.apply_chat_template(chat, return_dict=False)
    assert live.asked[0] == rendered and rendered[0] != tokenizer.bos_token_id
    assert live.asked[1][: len(rendered)] == rendered and tokenizer.bos_token_id not in live.asked[1]
    assert live.asked[2] == tokenizer("hi")["input_ids"] == [tokenizer.bos_token_id, *live.asked[2][1:]]
    assert live.asked[3][0] == rendered[0]


def test_a_chat_is_read_as_problems_are(made):
    config, policy, _ = made("one_turn")
    live = Talkative()
    asker = AgentPolicy(live, policy, Sampling(), config, np.zeros((9, 2), np.uint32))
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " 1+1?"}]
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    user = {"role": "user", "content": parts}
    asyncio.run(replied(asker, asker.chat([user, called, user])))
    assert policy.tokenizer.decode(live.asked[0]) == "[user:What is 1+1?[assistant:<eos>[user:What is 1+1?[assistant:"
    with pytest.raises(ValueError, match="policy.chat: messages: must hold a list of messages"):
        asyncio.run(replied(asker, asker.chat("hello")))
    with pytest.raises(ValueError, match="chat_template_kwargs.breif: .* does not read it"):
        asyncio.run(replied(asker, asker.chat([user], chat_template_kwargs={"breif": True})))
    for limit in ("3", 0, 2.0):
        with pytest.raises(ValueError, match="max_tokens = .*: takes a whole number from 1"):
            asyncio.run(replied(asker, asker.complete("1+1=", max_tokens=limit)))


THINKS = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}<eos>{% endfor %}"
    "{% if messages | length == 1 %}[a:<think>\n{% endif %}"
)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("agent", "opening"),
    [
        ("one_chat", "<think>"),
        pytest.param("talks", "", marks=pytest.mark.campaign),
        pytest.param("one_turn", "", marks=pytest.mark.campaign),
    ],
)
def test_graders_know_whether_the_last_prompt_opened_thoughts(made, monkeypatch, agent, opening):
    config, policy, params = made(agent)
    policy.tokenizer.chat_template = THINKS
    seen = []
    monkeypatch.setattr(Grading, "submit", lambda self, asked: seen.extend(asked) or Future())
    monkeypatch.setattr(agents.Grades, "result", lambda self: [])
    sampled(config, policy, params)
    assert [one.opening for one in seen] == [opening] * 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "template", "begin"),
    [
        pytest.param("one_chat", {}, "[user:", marks=pytest.mark.slow),
        pytest.param("one_chat", {"brief": True}, "brief[user:", marks=pytest.mark.slow),
        ("one_chat", {"tools": [{}, {}], "brief": False}, "2 tools.[user:"),
        ("asks_briefly", {"brief": False, "tools": [{}]}, "1 tools.brief[user:"),
    ],
)
def test_chats_of_agents_have_the_variables_of_their_problem(made, agent, template, begin):
    config, policy, params = made(agent, "task.reward=recjax.tasks.rewards:exact_match")
    policy.tokenizer.chat_template = CHATS.replace("{% for", "{% if brief %}brief{% endif %}{% for", 1)
    groups, _ = sampled(config, policy, params, [SUMS[0]._replace(template=template)], group_size=6)
    assert policy.tokenizer.decode(groups[0].prompt_tokens).startswith(begin)


def completions_of(groups):
    return [one for group in groups for one in group.completions]


def same(ours, theirs, tolerance=0.0):
    """The same tokens, and log-probs to the bit or but for rounding."""
    for one, other in zip(ours, theirs, strict=True):
        for row, its in zip(one.rows, other.rows, strict=True):
            np.testing.assert_array_equal(row.tokens, its.tokens)
            assert_same_logprobs(row.behavior_logprobs, its.behavior_logprobs, tolerance)


@pytest.mark.campaign
def test_nothing_holds_a_batchs_engine_any_more(made, monkeypatch):
    """Its copy of the weights and its cache are gone at once, not when Python next looks for cycles."""
    engines = []

    class Seen(Engine):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            engines.append(weakref.ref(self))

    monkeypatch.setattr(agents, "Engine", Seen)
    gc.disable()
    try:
        groups, _ = sampled(*made("one_turn"))
        assert len(completions_of(groups)) == 6 and len(engines) == 1
        assert engines[0]() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_one_turn_equals_a_run_without_agents(made):
    config, policy, params = made("one_turn")
    groups, grades = sampled(config, policy, params)
    prompts = encode_problems(SUMS, policy.tokenizer, None)
    keys = row_keys(jax.random.key(0), 3 * len(SUMS))
    plain = sample_groups(policy, params, prompts, keys, 3, 3, Sampling(), name="b", source="policy", version=3)
    for one, expected in zip(completions_of(groups), completions_of(plain), strict=True):
        assert (one.id, one.text, one.truncated) == (expected.id, expected.text, expected.truncated)
        (row,), (theirs,) = one.rows, expected.rows
        assert one.policy_version == 3 and row.mask.all()
        np.testing.assert_array_equal(row.prompt_tokens, theirs.prompt_tokens)
        np.testing.assert_array_equal(row.tokens, theirs.tokens)
        assert_same_logprobs(row.behavior_logprobs, theirs.behavior_logprobs)
    digits = [sum(character.isdigit() for character in one.text) / 3 for one in completions_of(groups)]
    np.testing.assert_allclose([grade.reward for grade in grades], digits, atol=1e-6)
    assert all(grade.reward_parts["turns"] == grade.reward_parts["rows"] == 1 for grade in grades)


def trainers_logprobs_are_the_engines(made, agent, lora=False, options=()):
    """On the mesh in context, each row by itself and packed."""
    overrides = [*options, *(["model.lora={rank: 2, alpha: 8, targets: [query, down]}"] if lora else [])]
    config, policy, params = made(agent, *overrides)
    if lora:
        decoder, params = with_adapters(policy.decoder, params, config.model.lora, jax.random.key(4))
        # Adapters begin as nothing.
        params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params)
        policy = policy._replace(decoder=decoder)
    groups, _ = sampled(config, policy, params)
    batch = pad(groups, Shape(8, None, 89, 89))
    packed = jax.tree.map(jnp.asarray, pack(batch, RowShape(2, 128), batch.trajectories))
    mask = batch.completion_mask
    assert mask.any(-1).sum() >= 6 and ((batch.token_mask & ~mask).any() or agent == "at_once")
    for layout in (Layout(2), Layout(1, packed)):
        logprobs = scored(layout, policy.decoder, params, put_rows(batch), Sampling(), 64).logprobs
        assert_same_logprobs(on_host(logprobs)[mask], batch.behavior_logprobs[mask])


scored = jax.jit(batch_logprobs, static_argnums=(1, 4, 5))


@pytest.mark.parametrize(
    ("agent", "lora"),
    [
        pytest.param("several_turns", False, id="several_turns", marks=pytest.mark.slow),
        pytest.param("several_turns", True, id="several_turns-lora", marks=pytest.mark.campaign),
        pytest.param("at_once", False, id="at_once", marks=pytest.mark.campaign),
        pytest.param("talks", False, id="talks", marks=pytest.mark.campaign),
        pytest.param("talks", True, id="talks-lora", marks=pytest.mark.slow),
    ],
)
def test_the_trainers_logprobs_are_the_engines(made, agent, lora):
    trainers_logprobs_are_the_engines(made, agent, lora)


CALLS = f"task.tools=['{TOOLS}add']"


@pytest.mark.campaign
@pytest.mark.parametrize("sizes", [(2, 1, 2), (1, 2, 1)], ids=["data-tensor", "fsdp"])
@pytest.mark.parametrize(
    ("agent", "lora", "options"),
    [("several_turns", False, ()), ("talks", True, ()), ("tools", False, (CALLS, "rollout.max_completion_tokens=4"))],
    ids=["text", "chat-lora", "tools"],
)
def test_they_are_on_a_mesh(made, monkeypatch, sizes, agent, lora, options):
    calls = iter([[Call("add", {"a": 2, "b": 3})]] * 6 + [[]] * 6)
    monkeypatch.setattr("recjax.agents.named_agents.parsed_calls", lambda text: next(calls))
    with on(sizes):
        trainers_logprobs_are_the_engines(made, agent, lora, options)


def test_turns_join_into_rows_as_they_should(made):
    groups, grades = sampled(*made("several_turns"))
    for one, grade in zip(completions_of(groups), grades, strict=True):
        first, beside = one.rows
        assert len(beside.tokens) <= 2 and beside.mask.all()
        assert grade.reward_parts["turns"] == 4 and grade.reward_parts["rows"] == 2
        assert first.mask[0] and first.mask[-1] and (~first.mask).sum() == 2 + len(beside.tokens)


@pytest.mark.slow
def test_a_chat_whose_prompts_go_on_has_one_row(made):
    talks, _ = sampled(*made("talks"))
    assert all(len(one.rows) == 1 for one in completions_of(talks))


@pytest.mark.slow
def test_a_template_that_drops_something_gives_a_further_row(made):
    config, policy, params = made("talks")
    policy.tokenizer.chat_template = CHATS.replace("{{ m.content }}", "{{ m.content[:2] }}")
    groups, grades = sampled(config, policy, params)
    rows = [len(one.rows) for one in completions_of(groups)]
    assert max(rows) == 2 and [grade.reward_parts["rows"] for grade in grades] == rows


@pytest.mark.slow
def test_equal_keys_alone_give_bit_equal_trajectories(made):
    parts = made("several_turns")
    first, again, other = (completions_of(sampled(*parts, seed=seed)[0]) for seed in (0, 0, 1))
    same(first, again)
    assert [one.rows[0].tokens.tolist() for one in first] != [one.rows[0].tokens.tolist() for one in other]
    # Every agent has keys of its own, and so has every turn: two replies to one prompt differ.
    assert len({(*row.tokens[row.mask].tolist(),) for row, *_ in (one.rows for one in first)}) == len(first)
    assert {grade.reward for grade in sampled(*made("at_once"))[1]} == {2.0}


DOES = {
    "raise": "raised", "exit": "raised", "cancel": "raised", "hang": "timeout", "deaf": "timeout",
    "nonsense": "invalid", "infinite": "invalid", "paid nonsense": "invalid", "silent": "silent",
    "digits in a text": "invalid", "name of recjax": "invalid", "empty stop": "raised",
    "long": "context", "on and on": "turns", "long in a group": "context", "long in a framework": "context",
    "grid": "raised", "unprintable": "raised", "odd object": "invalid",
}  # fmt: skip


@pytest.mark.slow
def test_an_agents_own_client_samples_from_the_policy(made, caplog):
    asked = [Problem("1+2=", "3", columns={"do": what}) for what in ("fine", "fine")]
    groups, grades = sampled(*made("has_a_client"), asked, group_size=1)
    direct, _ = sampled(*made("talks"), asked, group_size=1)
    same(completions_of(groups), completions_of(direct))
    for grade, one in zip(grades, completions_of(groups), strict=True):
        assert grade.reward_parts["turns"] == 2
        assert grade.reward_parts["seen"] == one.rows[-1].mask[one.turns[0].end :].sum()
    asked = [Problem("1+2=", "3", columns={"do": what}) for what in ("fine", "hot", "long", "stranger")]
    _, grades = sampled(*made("has_a_client"), asked, group_size=1)
    assert [grade.failure for grade in grades] == ["none", "raised", "context", "raised"]
    assert "temperature = 0.5: policy.base_url takes None; remove it" in caplog.text


def test_a_group_with_a_mistake_is_a_mistake():
    full = ContextFull("full")
    for inner, expected in [([full, full], ContextFull), ([full, KeyError("a")], ExceptionGroup)]:
        assert type(root_failure(ExceptionGroup("group", inner))) is expected
    circle = KeyError("a")
    circle.__cause__ = ValueError("b")
    circle.__cause__.__cause__ = circle
    assert root_failure(circle) is circle


@pytest.mark.parametrize("prompt", [None, 7, 1.5, [[1, 2]], [1.0, 2.0], [{"role": "user"}], [[1], [2, 3]], []])
def test_a_prompt_of_another_form_is_refused(prompt):
    with pytest.raises(ValueError, match="policy.complete: the prompt is"):
        token_ids(prompt)


@pytest.mark.slow
def test_failing_agents_cost_themselves_alone(made, caplog):
    parts = made("by_column", "task.agent_seconds=0.3", "task.agent_turns=5")
    asked = [Problem("1+2=", "3", columns={"do": what}) for what in ("no stop", *DOES, "fine")]
    groups, grades = sampled(*parts, asked, group_size=1)
    assert [grade.failure for grade in grades] == ["none", *DOES.values(), "none"]
    assert {*DOES.values()} == {*AGENT_FAILURES}
    assert [grade.reward for grade in grades] == [0.5, *[None] * len(DOES), 0.5]
    alone, _ = sampled(*parts, [asked[0], *[asked[-1]] * (len(DOES) + 1)], group_size=1)
    ours, theirs = ([completions_of(each)[place] for place in (0, -1)] for each in (groups, alone))
    same(ours, theirs, 2e-5)
    gc.collect()
    assert "Task was destroyed but it is pending" not in caplog.text, "an agent goes on after its time"


def test_a_busy_device_costs_no_agent_seconds(made, monkeypatch):
    """Keys are made on the device, which may first have an update to finish."""

    def slow_keys(*arguments):
        time.sleep(1.0)
        return row_keys(*arguments)

    monkeypatch.setattr(agents, "row_keys", slow_keys)
    _, grades = sampled(*made("rests", "task.agent_seconds=0.5"))
    assert [grade.failure for grade in grades] == ["none"] * 6


@pytest.mark.slow
def test_a_request_in_the_engine_ends_with_its_agent(made, monkeypatch):
    live, one_step = [], Engine.step

    def slow_step(engine):
        time.sleep(0.1)
        done = one_step(engine)
        live.append(int(engine._slots.live.sum()))
        return done

    monkeypatch.setattr(Engine, "step", slow_step)
    config, policy, params = made("asks_at_length", "task.agent_seconds=0.3", "rollout.max_completion_tokens=80")
    parts = config, policy._replace(stop_ids=()), params
    ends = {"overruns": "timeout", "gives up": "timeout", "leaves": "none", "breaks": "raised"}
    asked = [Problem("1+2=", "3", columns={"do": what}) for what in ("plays", *ends, "plays")]
    groups, grades = sampled(*parts, asked, group_size=1)
    assert [grade.failure for grade in grades] == ["none", *ends.values(), "none"]
    assert [grade.reward for grade in grades] == [0.5, None, None, 0.5, None, 0.5]
    # The long replies take five rounds. In the last ones nobody else has a slot any more.
    assert max(live) == 4 and live[-4:] == [2, 2, 2, 0]
    turns = [grade.reward_parts["turns"] if grade.reward_parts else None for grade in grades]
    assert turns == [2, None, None, 1, None, 2]
    assert [len(one.rows[0].tokens) for one in completions_of(groups)[1:-1]] == [2] * 4
    alone, _ = sampled(*parts, [asked[0]] * 6, group_size=1)
    ours, theirs = ([completions_of(each)[place] for place in (0, -1)] for each in (groups, alone))
    assert all(len(one.rows) == 2 and len(one.rows[1].tokens) == 80 for one in ours)
    same(ours, theirs, 2e-5)


@pytest.mark.slow
def test_a_failure_has_a_reward_or_ends_the_run(made):
    asked = [Problem("1+2=", "3", columns={"do": "raise"})]
    _, grades = sampled(*made("by_column", "task.agent_failure_reward=-1.0"), asked, group_size=6)
    assert [(grade.reward, grade.accurate) for grade in grades] == [(-1.0, False)] * 6
    with pytest.raises(
        ValueError, match="all 6 agents of a batch failed, the first with raised: KeyError: 'a mistake'"
    ):
        sampled(*made("by_column"), asked, group_size=6)


@pytest.mark.slow
def test_a_stop_string_ends_a_reply_at_its_token(made):
    config, policy, params = made("stops", "rollout.max_completion_tokens=40")
    groups, _ = sampled(config, policy, params, SUMS[:1], group_size=4)
    whole, _ = sampled(*made("one_turn", "rollout.max_completion_tokens=40"), SUMS[:1], group_size=4)
    cut = 0
    for one, full in zip(completions_of(groups), completions_of(whole), strict=True):
        ours, theirs = one.rows[0].tokens, full.rows[0].tokens
        np.testing.assert_array_equal(ours, theirs[: len(ours)])
        ends = [full.text.find(end) for end in some_agents.STOPS if end in full.text]
        cut += bool(ends)
        assert one.text == (full.text[: min(ends)] if ends else full.text)
        if ends:  # with the token that completes the first of them
            decode = policy.tokenizer.decode
            found = [any(end in decode(tokens) for end in some_agents.STOPS) for tokens in (ours, ours[:-1])]
            assert found == [True, False] and not one.truncated
        else:
            assert len(ours) == len(theirs)
    assert cut


@pytest.mark.slow
def test_module_state_works_in_every_batch_with_agents(made):
    """asyncio's locks, and connections, work in the event loop that first used them."""
    parts = made("of_a_module", f"task.reward={HERE}of_a_module_too")
    with some_agents.answering() as url:
        for _ in range(2):
            groups, grades = sampled(*parts, [Problem(url, "3")], group_size=6)
            assert [(grade.failure, grade.reward) for grade in grades] == [("none", 200.0)] * 6
            assert all(len(one.turns) == 2 for one in completions_of(groups))


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "level"), [(2, "WARNING"), (4, "ERROR")])
def test_a_frequent_failure_of_agents_is_an_error_line(made, caplog, monkeypatch, bad, level):
    asked = [
        Problem("1+2=", "3", columns={"do": what}) for what in ["nonsense", *["raise"] * bad, *["fine"] * (5 - bad)]
    ]
    sampled(*made("by_column"), asked, group_size=1)
    (record,) = [record for record in caplog.records if "agents failed" in record.getMessage()]
    assert record.levelname == level
    assert f"{bad + 1} of 6 agents failed: invalid 1, raised {bad}" in record.getMessage()
    if level == "ERROR":
        assert "for the same reason" in record.getMessage() and "KeyError: 'a mistake'" in record.getMessage()
        assert record.getMessage().endswith("correct the agent")


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["raise", "silent raise", "interrupt"])
def test_a_failed_agent_counts_as_wrong_in_evaluations(made, fails):
    options = ["rollout.prompts_per_step=4", "evaluation.samples=1", "task.success=0.4"]
    config, policy, params = made("by_column", *options)

    def evaluated(*does):
        asked = [Problem("1+2=", "3", columns={"do": what}) for what in does]
        prompts = encode_problems(asked, policy.tokenizer, None)
        with Grading(config, load_reward(config.task.reward_name())) as grading, Agents(config, policy) as opened:
            return evaluate_policy(config, policy, params, prompts, grading, 0, params, opened)

    found = evaluated(*["fine"] * 4, fails)
    assert found.accuracy == 0.8 and [row["ungraded"] for row in found.samples] == [None] * 4 + ["raised"]
    assert abs(found.initial_kl) < 1e-5
    found = evaluated(*[fails] * 4, "fine")
    assert found.accuracy == 0.2 and [row["problem"] for row in found.samples] == [0, 1, 2, 3, 4]
    assert evaluated(fails).accuracy == 0.0
    with pytest.raises(ValueError, match="all agents of the evaluation failed, the last with raised: [^;]*; corr"):
        evaluated(*[fails] * 5)


SHAPED = [  # an agent's return value, rewards of its turns, weights, and whether it is right
    (1.0, {}, {"score": 0.5, "turns": -0.1}, True),
    (0.8, {0: 0.1, 1: 0.1}, {"score": 0.5, "rows": -1.0}, True),
    (0.5, {}, {"score": 4.0, "length": 2.0, "turns": 3.0}, False),
    ({"right": 1.0, "tidy": 0.0}, {}, {"right": 0.1, "length": -3.0}, None),
    ({"right": 1.0, "tidy": 0.0}, {0: 1.0}, {"right": 0.1, "length": -3.0}, None),
    ({"score": 0.5, "checks": 9.0}, {}, {"checks": 0.0, "length": 1.0}, False),
    ({"right": 0.8}, {0: 0.1, 1: 0.1}, {"right": 0.5}, True),
    ({"accuracy": 1.0, "tries": -0.6}, {1: -1.0}, {"accuracy": 0.0, "score": 2.0}, True),
    ({"accuracy": 0.0, "tries": 5.0}, {0: 1.0}, {"tries": -3.0}, False),
]


def test_shaping_parts_do_not_decide_an_agents_accuracy(made):
    config, *_ = made("one_turn", "task.agent_failure_reward=5.0")
    row = Row(np.ones(2, np.int32), np.ones(6, np.int32), np.ones(6, bool), None)
    completion = Completion("a", "policy", "", (row,), None, 0, True, turns=(Turn(0, 3), Turn(0, 6)))
    for returned, turns, weights, right in SHAPED:
        player = SimpleNamespace(rewards=turns, rewarded=sum(turns.values()) if turns else None)
        tried = [Trial(player, returned, failure, "", "") for failure in (None, "raised")]
        rewards = set()
        for chosen in ({}, weights):
            task = config.task.model_copy(update={"reward_weights": chosen})
            opened = AgentGrader(config.model_copy(update={"task": task}))
            grades = opened.grades(tried, [completion] * 2, {}, [])
            assert [grade.accurate for grade in grades] == [right, None if right is None else False]
            rewards.add(grades[0].reward)
        assert len(rewards) == 2, "the weights have an effect"


def test_an_evaluation_names_the_remedies_of_its_failures(caplog):
    for reasons, by_agents, words in (
        (["raised", None, "timeout"], True, "raised 1, timeout 1; correct the agent; raise task.agent_seconds, or"),
        (["timeout", "no_reward"], False, "timeout 1, no_reward 1; see grading.seconds and grading.max_characters"),
        (["no_reward"], False, "count as wrong: no_reward 1"),
    ):
        caplog.clear()
        warn_of_ungraded(reasons, by_agents)
        assert words in caplog.text and ("grading.seconds" in caplog.text) == ("see grading.seconds" in words)
    warn_of_ungraded([None], True)


def test_weights_of_agents_are_those_of_their_task(made):
    config, *_ = made("one_turn")
    weights = {"a": {"style": 10, "turns": -5}, "b": {"style": 100}, "c": {"turns": -5}}
    mixture = {name: {"arithmetic": {}, "reward_weights": chosen} for name, chosen in weights.items()}
    opened = AgentGrader(config.replace(**{"task.arithmetic": None, "task.reward": None, "task.mixture": mixture}))
    row = Row(np.ones(2, np.int32), np.ones(6, np.int32), np.ones(6, bool), None)
    player = SimpleNamespace(rewards={}, rewarded=None)
    rewards = []
    for task, returned in (("a", {"accuracy": 1, "style": 1}), ("b", {"accuracy": 1, "style": 1}), ("c", None)):
        completion = Completion("a", "policy", "", (row,), None, 0, False, turns=(Turn(0, 6),), metadata={"task": task})
        graded = [Grade(0.0, {"score": 0.0}, False)] if returned is None else []
        (grade,) = opened.grades([Trial(player, returned, None, "", "")], [completion], {}, graded)
        rewards.append(grade.reward)
    assert rewards == [6.0, 101.0, -5.0]
    with pytest.raises(ValueError, match="task.mixture.c.reward_weights.style: unknown part"):
        mixture["c"]["reward_weights"] = {"style": 1.0}
        opened = AgentGrader(config.replace(**{"task.arithmetic": None, "task.reward": None, "task.mixture": mixture}))
        opened.grades([Trial(player, 1.0, None, "", "")], [completion], {}, [])
    with pytest.raises(ValueError, match="task.mixture.b: the agent returns a part 'b'.*rename the task"):
        opened.grades([Trial(player, {"b": 1.0}, None, "", "")], [completion], {}, [])


def test_a_trial_without_a_reward_has_no_parts(made):
    config, *_ = made("one_turn")
    row = Row(np.ones(2, np.int32), np.ones(6, np.int32), np.ones(6, bool), None)
    completion = Completion("a", "policy", "", (row,), None, 0, False, turns=(Turn(0, 6),))
    for turns in ({}, {0: 1.0}):
        player = SimpleNamespace(rewards=turns, rewarded=sum(turns.values()) if turns else None)
        ungraded = Grade(None, None, None, "no_reward")
        (grade,) = AgentGrader(config).grades([Trial(player, None, None, "", "")], [completion], {}, [ungraded])
        assert grade.reward is None and grade.reward_parts is None


def test_an_agents_part_has_one_weight(made):
    config, *_ = made("one_turn", "algorithm.preset=gdpo")
    row = Row(np.ones(2, np.int32), np.ones(6, np.int32), np.ones(6, bool), None)
    completion = Completion("a", "policy", "", (row,), None, 0, False, turns=(Turn(0, 6),))
    tried = [Trial(SimpleNamespace(rewards={}, rewarded=None), 1.0, None, "", "")]
    AgentGrader(config).grades(tried, [completion], {"format": 0.1}, [])
    with pytest.raises(ValueError, match="task.reward_weights.score: .* weight 1, and the task's reward .* weight 0;"):
        AgentGrader(config).grades(tried, [completion], {"score": 0.0}, [])


@pytest.mark.slow
def test_a_slow_agent_holds_up_nobody(made):
    some_agents.events.clear()
    asked = [Problem("1+2=", "3", columns={"do": what}) for what in ("slow", *["fast"] * 5)]
    _, grades = sampled(*made("waits_for_others", "task.agent_seconds=60"), asked, group_size=1)
    assert [grade.reward for grade in grades] == [1.0, *[0.0] * 5]


@pytest.mark.slow
def test_weights_apply_to_returned_parts_and_turns(made):
    parts = made("several_turns", "task.reward_weights={digits: 2.0, turns: -0.25, accuracy: 0.0}")
    _, grades = sampled(*parts)
    for grade in grades:
        np.testing.assert_allclose(grade.reward, 2 * grade.reward_parts["digits"] - 1, atol=1e-6)
    with pytest.raises(ValueError, match=r"task.reward_weights.digit: unknown part; choose .*: digits, accuracy"):
        sampled(*made("several_turns", "task.reward_weights={digit: 2.0}"))


@pytest.mark.slow
def test_turn_rewards_reach_the_batch_and_the_record(made):
    parts = made("paid_by_turn", "task.agent_failure_reward=-1.0", "task.reward_weights={score: 2.0, turns: -0.1}")
    groups, grades = sampled(*parts, group_size=2)
    np.testing.assert_allclose([grade.reward for grade in grades], [3.7, 3.7, -1, -1], atol=1e-6)
    groups = with_grades(groups, grades)
    (kept,) = from_plain(*to_plain(Queue(ready=(Entry(groups[0], 1, 0),)))).ready
    assert same_groups(kept.group, groups[0])
    groups = [kept.group, groups[1]]
    batch = pad(groups, Shape(8, None, 89, 89), turns=4)
    of_turns = {0: [0.5, 1.5, 1.7, np.nan], 1: [0, 0, -1, np.nan]}
    for number, group in enumerate(groups):
        for one in group.completions:
            tokens, mask = one.rows[0].tokens, one.rows[0].mask
            assert [turn.row for turn in one.turns] == [0, 0, 1] and one.turns[1].end == len(tokens)
            first, second = tokens[: one.turns[0].end], tokens[one.turns[0].end :]
            rows = np.flatnonzero([(row[: len(tokens)] == tokens).all() for row in _sampled_of(batch)])
            assert rows.size and mask.all()
            np.testing.assert_allclose(batch.turn_rewards[rows[0]], of_turns[number], atol=1e-6)
            turns = batch.token_turns[rows[0]][batch.completion_mask[rows[0]]]
            assert turns.tolist() == [0] * len(first) + [1] * len(second)
    assert {*batch.token_turns[batch.completion_mask].tolist()} == {0, 1, 2}
    assert (batch.token_turns[~batch.completion_mask] == -1).all()
    with pytest.raises(ValueError, match="has 2 token sequences without turns; choose an advantage that"):
        bare = groups[0]._replace(completions=(groups[0].completions[0]._replace(turns=()),))
        pad([bare], Shape(8, None, 89, 89), turns=4)


def _sampled_of(batch):
    """The tokens of each row that its policy sampled, filled up with -1."""
    return [
        np.r_[row[mask], np.full(99, -1)] for row, mask in zip(batch.completions, batch.completion_mask, strict=True)
    ]


def test_an_environment_is_played_to_its_end(made):
    parts = made("environment", f"task.environment={HERE}Countdown")
    groups, grades = sampled(*parts)
    tokenizer = parts[1].tokenizer
    for one, grade in zip(completions_of(groups), grades, strict=True):
        (row,) = one.rows
        text, told = tokenizer.decode(row.tokens), tokenizer.decode(row.tokens[~row.mask])
        assert told == "21" and grade.reward_parts["turns"] == 3, text
        assert tokenizer.decode(row.prompt_tokens).endswith("=9")
        turns = np.split(row.tokens, np.flatnonzero(np.diff(row.mask)) + 1)[::2]
        said = [turn[:-1] if turn[-1] in parts[1].stop_ids else turn for turn in turns]
        assert grade.reward == sum(len(tokenizer.decode(turn)) for turn in said)
        assert [*grade.turns] == [len(tokenizer.decode(turn)) for turn in said]


@pytest.mark.slow
def test_environments_are_closed_whatever_comes_of_them(made):
    does = {
        "fine": "none", "end later": "none", "break at the end": "none",
        "raise": "raised", "raise at first": "raised", "long": "context",
    }  # fmt: skip
    some_agents.opened.clear()
    some_agents.closed.clear()
    parts = made("environment", f"task.environment={HERE}Closing")
    asked = [Problem("1+2=", "3", columns={"do": what}) for what in does]
    _, grades = sampled(*parts, asked, group_size=2)
    assert [grade.failure for grade in grades] == [end for end in does.values() for _ in range(2)]
    assert sorted(some_agents.opened) == sorted(some_agents.closed) == sorted([*does] * 2)


def play(made, environment, prompt, does):
    """What an environment's agent returns, the agent's policy, and the texts that it was asked."""
    config, policy, _ = made("environment", f"task.environment={HERE}Chatty")
    live = Talkative()
    asker = AgentPolicy(live, policy, Sampling(), config, np.zeros((9, 2), np.uint32))
    problem = Problem(prompt, "3", columns={"do": does})
    returned = asyncio.run(replied(asker, environment_agent(environment, 2)(problem, asker)))
    return returned, asker, [policy.tokenizer.decode(ids) for ids in live.asked]


def test_an_environment_may_be_of_coroutines_and_messages(made):
    chat = [{"role": "user", "content": "go"}]
    returned, asker, asked = play(made, some_agents.Chatty, chat, "messages")
    assert returned == 0.0 and asker.rewarded == 1.0
    assert asked[0] == "[user:go[assistant:" and asked[1].endswith("<eos>[tool:so[user:on[assistant:")


@pytest.mark.parametrize(
    ("environment", "prompt", "does", "message"),
    [
        ("Chatty", "1+2=", "messages", "the observation is .*after a prompt that is a text, return a text or None"),
        ("Chatty", "1+2=", "number", "the observation is 3; after a prompt that is a text"),
        ("Chatty", [{"role": "user", "content": "go"}], "number", "the observation is 3; return a text, a list of"),
        ("Chatty", "1+2=", "four", r"step\(\) returned .*; return \(observation, reward, terminated, truncated, info"),
        ("Unseeded", "1+2=", "", r"reset\(\) must take a seed .*; write it as reset\(self, \*, seed=None"),
    ],
)
def test_an_environment_of_another_form_is_refused(made, environment, prompt, does, message):
    with pytest.raises(ValueError, match=f"task.environment: {message}"):
        play(made, getattr(some_agents, environment), prompt, does)


@pytest.mark.parametrize("does", ["fine", "break at the end", "end later"])
def test_an_environment_is_closed_when_its_agent_is_canceled(does):
    async def main():
        waits = asyncio.Event()

        class Policy:
            async def complete(self, told):
                waits.set()
                await asyncio.Event().wait()

        play = environment_agent(some_agents.Closing, 3)
        task = asyncio.ensure_future(play(Problem("1+2=", "3", columns={"do": does}), Policy()))
        await waits.wait()
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    some_agents.closed.clear()
    assert asyncio.run(main()) and some_agents.closed == [does]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("not_async", "must be a coroutine function; write it as async def"),
        ("of_one", "must take a problem and a policy"),
        ("nowhere", "AttributeError.*must be importable"),
    ],
)
def test_what_is_no_agent_is_refused_before_work_starts(made, name, message):
    config, policy, _ = made(name)
    with pytest.raises(ValueError, match=f"task.agent = .*{name}.*{message}"):
        Agents(config, policy)


def test_calls_are_read_as_models_write_them():
    said = (
        'I add.<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call> and'
        '<tool_call>[{"name": "die", "arguments": {}}, {"name": "fail", "parameters": {"text": "x"}}]</tool_call>'
    )
    assert parsed_calls(said) == [Call("add", {"a": 1, "b": 2}), Call("die", {}), Call("fail", {"text": "x"})]
    assert parsed_calls("no call, {}") == []
    wrong = ["{", '"add"', '{"arguments": {}}', '{"name": "add", "arguments": [1]}']
    errors = [parsed_calls(f"<tool_call>{text}</tool_call>")[0].error for text in wrong]
    assert all(errors) and "not JSON" in errors[0] and "object" in errors[3]


@pytest.mark.slow
def test_tools_run_in_processes_of_their_own():
    names = [f"{TOOLS}{name}" for name in ("add", "sleep", "die", "fail")]
    functions = {name: getattr(some_tools, name.partition(":")[2]) for name in names}

    async def main(tools):
        calls = [
            tools.answer(Call("sleep", {"seconds": 60})),
            tools.answer(Call("add", {"a": 2, "b": 3})),
            tools.answer(Call("die", {})),
            tools.answer(Call("fail", {"text": "so it is"})),
            tools.answer(Call("add", {"a": 1, "b": 2, "c": 1})),
            tools.answer(Call("multiply", {})),
        ]
        return await asyncio.gather(*calls)

    with Tools(functions, workers=2, seconds=3.0) as tools:
        assert [schema["function"]["name"] for schema in tools.schemas] == ["add", "sleep", "die", "fail"]
        assert {*tools.schemas[0]["function"]["parameters"]["properties"]} == {"a", "b"}
        slept, added, died, failed, wrong, unknown = asyncio.run(main(tools))
    assert (slept, added) == ("error: it took too long", "5")
    assert died == "error: it crashed" and failed == "error: ValueError: so it is"
    assert "got an unexpected keyword argument 'c'" in wrong and "there is no tool 'multiply'; there are add" in unknown


def test_arguments_are_checked_against_the_tools_schema():
    def search(query: str, count: int | None = None, nullable: bool = False) -> str:
        """
        Searches.

        Args:
            query: words
            count: number of results
            nullable: flag
        """

    given = {
        "count: '3' is not of type 'integer', 'null'": {"query": "a", "count": "3"},
        "query: ['a'] is not of type 'string'": {"query": ["a"]},
        "nullable: 1 is not of type 'boolean'": {"query": "a", "nullable": 1},
    }
    with Tools({f"{TOOLS}search": search}, workers=1, seconds=1.0) as tools:
        for error, arguments in given.items():
            assert asyncio.run(tools.answer(Call("search", arguments))) == f"error: {error}"
        assert tools._problem(Call("search", {"query": "a", "count": None, "nullable": True})) is None
    search.schema = {"type": "function", "function": {"name": "search", "parameters": {"type": "whole"}}}
    with pytest.raises(ValueError, match="task.tools: .*search: its parameters are no JSON schema"):
        Tools({f"{TOOLS}search": search}, workers=1, seconds=1.0)


def test_an_unsendable_result_fails_only_its_own_call():
    names = ["add", "sleep", "refuse", "give", "wait", "refuse_later"]
    functions = {f"{TOOLS}{name}": getattr(some_tools, name) for name in names}
    given = {
        "lock": "<unlocked _thread.lock object", "circle": "[[...]]", "keys": "{(1, 2): 3}", "surrogate": "a?b",
        "long": "x" * 20_000, "exit": "error: SystemExit: 3", "local": '"a local"', "fish": '{"given": "fish"}',
        "unprintable": "error: Unprintable: its message cannot be printed",
    }  # fmt: skip

    async def main(tools):
        await tools.answer(Call("add", {"a": 0, "b": 0}))  # the workers have started
        began = time.monotonic()
        calls = [
            tools.answer(Call("sleep", {"seconds": 1.0})),
            *(tools.answer(Call("give", {"what": what})) for what in given),
            tools.answer(Call("refuse", {"text": "no"})),
            tools.answer(Call("refuse_later", {"text": "not now"})),
            *(tools.answer(Call("wait", {"seconds": 0.01})) for _ in range(4)),
            tools.answer(Call("add", {"a": 2, "b": 3})),
        ]
        return await asyncio.gather(*calls), time.monotonic() - began

    with Tools(functions, workers=2, seconds=20.0) as tools:
        (slept, *told, refused, later, w0, w1, w2, w3, added), seconds = asyncio.run(main(tools))
    assert (slept, added) == ("slept", "5") and seconds < 15
    assert [w0, w1, w2, w3] == ["2"] * 4
    assert (refused, later) == ("error: Refused: no", "error: Refused: not now")
    for text, expected in zip(told, given.values(), strict=True):
        assert text.strip('"').startswith(expected.strip('"'))


@pytest.mark.parametrize("name", ["yields", "yields_later"])
def test_a_tool_that_yields_is_refused(name):
    with pytest.raises(ValueError, match=f"task.tools: {TOOLS}{name} yields; write a function"):
        Tools({f"{TOOLS}{name}": getattr(some_tools, name)}, workers=1, seconds=1.0)


def test_the_tools_agent_needs_a_template_for_results(made, caplog):
    config, policy, _ = made("tools", f"task.tools=['{TOOLS}add']")
    Agents(config, policy).__exit__()
    assert "shows no tools" not in caplog.text
    policy.tokenizer.chat_template = CHATS.partition("{% endif %}")[2]
    Agents(config, policy).__exit__()
    assert "the chat template of the tokenizer shows no tools to the model" in caplog.text
    refusal = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no call') }}{% endif %}{% endfor %}"
    policy.tokenizer.chat_template = refusal + CHATS
    with pytest.raises(ValueError, match="task.agent = 'tools': the chat template .*'tool'.*: no call"):
        Agents(config, policy)


CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("prompt", "text", "answer"),
    [
        ("?", f"<think>{CALL}</think> 3", " 3"),
        ("?<think>", f"{CALL}</think> 3", " 3"),
        ("?<think>", f"{CALL} and on", ""),
        ("?<think>", f"so</think>{CALL}", CALL),
        ("?", CALL, CALL),
    ],
)
def test_a_call_inside_thoughts_is_a_draft(made, prompt, text, answer):
    config, policy, _ = made("one_turn")
    live = Talkative(policy.tokenizer.encode(text, add_special_tokens=False))
    asker = AgentPolicy(live, policy, Sampling(), config, np.zeros((9, 2), np.uint32))
    reply = asyncio.run(replied(asker, asker.complete(prompt)))
    assert (reply.text, reply.answer) == (text, answer)


def test_a_model_reads_the_results_of_its_tools(made, monkeypatch):
    config, policy, params = made("tools", f"task.tools=['{TOOLS}add']", "rollout.max_completion_tokens=4")
    # An untrained model calls nothing, so it is read as if it did at first.
    calls = iter([[Call("add", {"a": 2, "b": 3})]] * 6 + [[]] * 6)
    monkeypatch.setattr("recjax.agents.named_agents.parsed_calls", lambda text: next(calls))
    groups, grades = sampled(config, policy, params, SUMS[:1], group_size=6)
    decode = policy.tokenizer.decode
    for one, grade in zip(completions_of(groups), grades, strict=True):
        (row,) = one.rows
        assert decode(row.prompt_tokens) == "1 tools.[user:1+2=[assistant:"
        assert decode(row.tokens[~row.mask]).endswith("[tool:5[assistant:")
        assert grade.reward_parts["turns"] == 2 and grade.failure == "none"


def test_unclosed_calls_are_read_in_linear_time():
    began = time.perf_counter()
    assert parsed_calls("<tool_call>" * 20_000) == []
    assert time.perf_counter() - began < 5.0
    assert split_calls("a</tool_call>b<tool_call>1<tool_call>2</tool_call>c") == (["1<tool_call>2"], "a</tool_call>bc")
