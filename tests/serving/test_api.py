"""The server's API: the engine's completions, in OpenAI's words."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from recjax.hub.chat_rendering import render_chats
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import decode_after
from recjax.models.decoder import Decoder, init_params
from recjax.models.decoder_config import DecoderConfig
from recjax.models.sampling import Sampling
from recjax.rollout.engine import Engine
from recjax.rollout.live import LiveEngine
from recjax.rollout.requests import Request, Sampled
from recjax.serving.bodies import Chat, read_body
from recjax.serving.replies import Chunks, Job, Prompt, full_reply, message_parts, row_of_call
from recjax.serving.sampler import Piece, Sampler, certain
from tests.closeness import assert_same_logprobs
from tests.hub.test_tokenizers import sentencepiece_like
from tests.serving.some_server import LIMITS, POLICY, SHAPE, TOKENIZER, chunks, initial, post, serve
from tests.tiny import params_of

TEXT, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("served")) as client:
        yield client


@pytest.mark.slow
def test_completions_are_the_engines(client):
    reply = post(client, TEXT, prompt="1+2=", seed=5, n=2, max_tokens=20, logprobs=0, return_token_ids=True)
    engine = Engine(POLICY.decoder, POLICY.stop_ids, slots=None, prefix_time=8)
    engine.replace_weights(initial(), 3)
    prompt = np.array(TOKENIZER.encode("1+2="), np.int32)
    keys = Sampler(LiveEngine(engine), POLICY, LIMITS, 0).keys(5, 2)
    engine.admit([Request(prompt, key, 20, Sampling()) for key in keys])
    for choice, expected in zip(reply["choices"], engine.drain().values(), strict=True):
        assert choice["token_ids"] == expected.tokens.tolist()
        assert_same_logprobs(np.array(choice["token_logprobs"]), expected.logprobs)
        assert choice["logprobs"]["token_logprobs"] == choice["token_logprobs"]
        assert choice["finish_reason"] == ("length" if expected.truncated else "stop")
        kept = expected.tokens if expected.truncated else expected.tokens[:-1]
        assert choice["text"] == TOKENIZER.decode(kept)
        assert choice["token_policy_versions"] == [3] * len(expected.tokens)
    assert reply["prompt_token_ids"] == prompt.tolist() and reply["policy_version"] == 3
    counted = sum(len(choice["token_ids"]) for choice in reply["choices"])
    assert reply["usage"] == {"prompt_tokens": 4, "completion_tokens": counted, "total_tokens": 4 + counted}


def test_nothing_repeats_but_what_has_a_seed(client):
    def texts(**options):
        return [one["text"] for one in post(client, TEXT, prompt="ab", max_tokens=20, n=3, **options)["choices"]]

    first, again = texts(seed=7), texts(seed=7)
    assert first == again and len({*first, *texts(seed=8), *texts(), *texts()}) == 12
    assert post(client, TEXT, prompt="ab", temperature=0, n=2)["choices"][0]["text"] == texts(temperature=0)[0][:16]


def test_prompts_of_every_kind_and_number(client):
    ids = TOKENIZER.encode("ab")
    for prompt in ("ab", ids, ["ab"], [ids]):
        assert (
            post(client, TEXT, prompt=prompt, seed=1)["choices"] == post(client, TEXT, prompt="ab", seed=1)["choices"]
        )
    reply = post(client, TEXT, prompt=["ab", "c"], n=2, max_tokens=2, return_token_ids=True)
    assert [choice["prompt_token_ids"] for choice in reply["choices"]] == [
        ids,
        ids,
        ids[:0] + TOKENIZER.encode("c"),
        TOKENIZER.encode("c"),
    ]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3] and "prompt_token_ids" not in reply


def test_a_chat_is_the_templates_text(client):
    reply = post(client, CHAT, messages=HELLO, seed=3, max_completion_tokens=9, logprobs=True, return_token_ids=True)
    assert TOKENIZER.decode(reply["prompt_token_ids"]) == "[user:hello[assistant:"
    (choice,) = reply["choices"]
    alone = post(client, TEXT, prompt="[user:hello[assistant:", seed=3, max_tokens=9)["choices"][0]["text"]
    assert choice["message"] == {"role": "assistant", "content": alone, "refusal": None}
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == choice["token_logprobs"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    assert post(client, CHAT, messages=parts, seed=3, max_tokens=9)["choices"][0]["message"]["content"] == alone
    tools = [{"type": "function", "function": {"name": "add"}}]
    asked = post(client, CHAT, messages=HELLO, tools=tools, max_tokens=1, return_token_ids=True)["prompt_token_ids"]
    assert TOKENIZER.decode(asked).startswith("1 tools.")
    for value, begin in ((False, "Brief.["), (True, "["), (None, "[")):
        options = {"chat_template_kwargs": {"enable_thinking": value}, "max_tokens": 1, "return_token_ids": True}
        assert TOKENIZER.decode(post(client, CHAT, messages=HELLO, **options)["prompt_token_ids"]).startswith(begin)


@pytest.mark.slow
def test_bytes_of_log_probs_are_those_of_the_tokens():
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({name: at for at, name in enumerate(["<eos>", *alphabet])}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", clean_up_tokenization_spaces=False)
    tokenizer.chat_template = TOKENIZER.chat_template
    shape = DecoderConfig(257, 16, 32, 1, 2, 1, 8)
    policy, params = Policy(Decoder(shape), tokenizer, (0,)), params_of(shape)
    with serve(None, policy=policy, params=params) as client:
        for seed in range(3):
            options = {"seed": seed, "max_tokens": 40, "return_token_ids": True}
            text = post(client, TEXT, prompt="é", logprobs=0, **options)["choices"][0]
            chat = post(client, CHAT, messages=HELLO, logprobs=True, **options)["choices"][0]
            streamed = [one["choices"][0] for one in chunks(client, CHAT, messages=HELLO, logprobs=True, **options)]
            whole = chunks(client, TEXT, prompt="é", logprobs=0, **options)
            whole = [one["choices"][0]["logprobs"] for one in whole if one["choices"][0]["logprobs"]]
            for key in ("bytes", "text_offset", "tokens"):
                assert sum((one[key] for one in whole), []) == text["logprobs"][key]
            content = chat["logprobs"]["content"]
            assert sum((one["logprobs"]["content"] for one in streamed if one["logprobs"]), []) == content
            said = chat["message"]["content"]
            for written, found, ids in (
                (text["text"], text["logprobs"]["bytes"], text["token_ids"]),
                (said, [one["bytes"] for one in content], chat["token_ids"]),
            ):
                end = "<eos>" if ids[-1] == 0 else ""
                assert all(len(one) == 1 for one in found[: len(found) - bool(end)])
                joined = bytes(sum(found, []))
                assert joined.decode(errors="replace") == written + end and "\ufffd" in written
                for name, one in zip(tokenizer.convert_ids_to_tokens(ids), found, strict=True):
                    assert name == "<eos>" or ord(name) > 255 or one == [ord(name)]
            offsets = text["logprobs"]["text_offset"]
            assert offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] <= len(text["text"])
            for offset, token in zip(offsets, text["logprobs"]["tokens"], strict=True):
                assert token in ("\ufffd", "<eos>", text["text"][offset : offset + 1])


CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "é": "\\""}'}},
    {"id": "c2", "type": "function", "function": {"name": "now", "arguments": ""}},
    {"id": "c3", "type": "function", "function": {"name": "odd", "arguments": "no JSON"}},
]


def test_templates_get_the_arguments_of_calls_as_objects(client, monkeypatch):
    loop = "{% for m in messages %}{% for c in m.tool_calls or [] %}%s;{% endfor %}{% endfor %}"
    ways = {
        "{{ c.function.arguments | tojson }}": '{"a": 1, "é": "\\""};{};"no JSON";',  # as Qwen2.5 does
        "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
        "{{ c.function.arguments | tojson }}{% endif %}": '{"a": 1, "é": "\\""};{};no JSON;',  # as Qwen3 does
        "{{ c.function.arguments }}": '{"a": 1, "é": "\\""};;no JSON;',
        "{{ '<' + c.function.arguments + '>' }}": '<{"a": 1, "é": "\\""}>;<>;<no JSON>;',  # as DeepSeek's does
        "{{ '<' ~ c.function.arguments }}": '<{"a": 1, "é": "\\""};<;<no JSON;',
        "{% if c.function.arguments is mapping %}{{ c.function.arguments | length }}{% endif %}": "2;0;;",
    }
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": CALLS}, HELLO[0]]
    sent = read_body(Chat, {"messages": messages}).messages
    for way, expected in ways.items():
        monkeypatch.setattr(TOKENIZER, "chat_template", loop.replace("%s", way))
        assert render_chats(TOKENIZER, [sent]) == [expected], way
        plain = json.loads(json.dumps(sent))
        for place in range(2):  # objects are taken as well
            function = plain[1]["tool_calls"][place]["function"]
            function["arguments"] = json.loads(function["arguments"] or "{}")
        assert [one.replace("{}", "") for one in render_chats(TOKENIZER, [plain])] == [expected.replace("{}", "")], way
    assert messages[1]["tool_calls"][0]["function"]["arguments"].startswith("{"), "the request is as it was"


def test_tokens_in_tokens_out(client):
    options = {"max_tokens": 5, "seed": 3, "logprobs": 1, "n": 2}
    reply = post(client, GENERATE, token_ids=[5, 6], sampling_params=options)
    expected = post(client, TEXT, prompt=[5, 6], max_tokens=5, seed=3, n=2, return_token_ids=True)["choices"]
    assert [one["token_ids"] for one in reply["choices"]] == [one["token_ids"] for one in expected]
    content = reply["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in content] == expected[0]["token_logprobs"]


def a_long_one(client):
    """A seed and its completion, of several rounds."""
    for seed in range(50):
        choice = post(client, TEXT, prompt="ab", seed=seed, max_tokens=60, return_token_ids=True)["choices"][0]
        if len(choice["token_ids"]) > 40:
            return seed, choice


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_a_completion_at_its_token(client, stream):
    seed, whole = a_long_one(client)
    stop = whole["text"][22:24]
    end = whole["text"].index(stop) + 2
    options = {"prompt": "ab", "seed": seed, "max_tokens": 60, "stop": ["\n\n\n", stop], "return_token_ids": True}
    if stream:
        found = [chunk["choices"][0] for chunk in chunks(client, TEXT, **options)]
        text = "".join(one["text"] for one in found)
        tokens = sum((one.get("token_ids", []) for one in found), [])
        finish = found[-1]["finish_reason"]
    else:
        choice = post(client, TEXT, **options)["choices"][0]
        text, tokens, finish = choice["text"], choice["token_ids"], choice["finish_reason"]
    assert (text, finish) == (whole["text"][: end - 2], "stop") and tokens == whole["token_ids"][:end]


def test_a_stream_says_what_the_whole_reply_says(client):
    options = {"messages": HELLO, "seed": 3, "n": 2, "max_tokens": 50, "logprobs": True, "return_token_ids": True}
    reply = post(client, CHAT, **options)
    found = chunks(client, CHAT, **options, stream_options={"include_usage": True})
    assert found[-1]["usage"] == reply["usage"] and found[-1]["choices"] == []
    assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"} and len(
        {chunk["id"] for chunk in found}
    ) == 1
    for index, choice in enumerate(reply["choices"]):
        own = [chunk["choices"][0] for chunk in found[:-1] if chunk["choices"][0]["index"] == index]
        assert len(own) >= 1 + len(choice["token_ids"]) / 17, "the prompt, and a piece a round"
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert own[0]["prompt_token_ids"] == reply["prompt_token_ids"]
        assert "".join(one["delta"].get("content", "") for one in own) == choice["message"]["content"]
        assert sum((one.get("token_ids", []) for one in own), []) == choice["token_ids"]
        logprobs = sum((one["logprobs"]["content"] for one in own if one["logprobs"]), [])
        assert logprobs == choice["logprobs"]["content"]
        assert [one["finish_reason"] for one in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]


@pytest.fixture(scope="module")
def pieces_client():
    """A client of a server of a policy whose tokens are pieces of a text, a space at the beginning of some."""
    tokenizer = sentencepiece_like(template="{{ messages[0].content }}", codes=[10])
    shape = dataclasses.replace(SHAPE, vocab_size=len(tokenizer))
    params = init_params(shape, jax.random.key(0))  # weights that sample spaces
    with serve(None, policy=Policy(Decoder(shape), tokenizer, (2,)), params=params) as client:
        yield tokenizer, client


@pytest.mark.parametrize("kind", [TEXT, CHAT])
@pytest.mark.slow
def test_spaces_between_a_prompt_and_its_completion_are_kept(pieces_client, kind):
    tokenizer, client = pieces_client
    prompt = {"prompt": "x="} if kind == TEXT else {"messages": [{"role": "user", "content": "x="}]}
    options = prompt | {"n": 8, "max_tokens": 30, "seed": 5, "return_token_ids": True, "logprobs": 1}
    if kind == CHAT:
        options["logprobs"] = True
    reply = post(client, kind, **options)
    head = reply["prompt_token_ids"]
    streamed = [chunk["choices"][0] for chunk in chunks(client, kind, **options) if chunk["choices"]]
    spaces = 0
    for index, choice in enumerate(reply["choices"]):
        ids = choice["token_ids"][: -1 if choice["finish_reason"] == "stop" else None]
        text = choice["text"] if kind == TEXT else choice["message"]["content"]
        assert text == decode_after(tokenizer, head, ids)
        spaces += text.startswith(" ")
        assert text.startswith(" ") == tokenizer.convert_ids_to_tokens(ids[:1])[0].startswith("▁")
        deltas = [one for one in streamed if one["index"] == index]
        whole = "".join(one["text"] if kind == TEXT else one["delta"].get("content", "") for one in deltas)
        assert whole == text
        logprobs = choice["logprobs"]
        tokens = logprobs["tokens"] if kind == TEXT else [one["token"] for one in logprobs["content"]]
        pieces = tokenizer.convert_ids_to_tokens(choice["token_ids"])
        assert tokens == [piece.replace("▁", " ").replace("<0x0A>", "\n") for piece in pieces]
    assert spaces


def test_what_is_certain_of_a_text():
    assert certain("ab</s", ["</stop>"]) == "ab" and certain("ab</x", ["</stop>"]) == "ab</x"
    assert certain("ab\ufffd", []) == "ab" and certain("", ["x"]) == ""
    assert certain("aba", ["abab", "ba"]) == "", "the longest beginning counts"


def a_piece(text, finish):
    tokens = np.array(TOKENIZER.encode(text), np.int32)
    return Piece(Sampled(tokens, tokens * -0.5, tokens * 0, True), text, finish)


PROMPT = Prompt(np.zeros(1, np.int32), "?", None)
DRAFT = '<think><tool_call>{"name": "x"}</tool_call></think>'


@pytest.mark.parametrize(
    ("written", "content", "names"),
    [
        ('Yes. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "Yes.", ["add"]),
        ('<tool_call>[{"name": "x"}, {"name": "y"}]</tool_call>', None, ["x", "y"]),
        ("<tool_call>{nonsense}</tool_call>", "<tool_call>{nonsense}</tool_call>", []),
        ("no call", "no call", []),
        (
            '<think><tool_call>{"name": "x"}</tool_call></think>3',
            '<think><tool_call>{"name": "x"}</tool_call></think>3',
            [],
        ),
        (f'{DRAFT}<tool_call>{{"name": "y"}}</tool_call>', DRAFT, ["y"]),
    ],
)
def test_tool_calls_are_read_and_streamed(written, content, names):
    asked = read_body(Chat, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "add"}}]})
    job = Job("chat", "chatcmpl-1", 0, "tiny", 3, asked, TOKENIZER, [PROMPT], [16], None, 0.0)
    said, calls = message_parts(job, 2, written)
    assert said == content and [call["function"]["name"] for call in calls] == names
    assert all(row_of_call(call["id"]) == "chatcmpl-1/2" for call in calls)
    one, deltas = Chunks(job, 2), []
    for size in range(1, len(written) + 1):
        deltas += one.next(a_piece(certain(written[:size], ["<tool_call>"]), None))
    deltas += one.next(a_piece(written, "stop"))
    choices = [chunk["choices"][0] for chunk in deltas]
    streamed = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert streamed.rstrip() == (content or "")
    assert [{"index": place} | call for place, call in enumerate(calls)] == choices[-1]["delta"].get("tool_calls", [])
    assert choices[-1]["finish_reason"] == ("tool_calls" if calls else "stop")
    assert _finishes(job, written, "length") == ["length"] * 2, "what was cut off says so, whatever it calls"
    without = job._replace(body=asked.model_copy(update={"tools": []}))
    assert message_parts(without, 0, written) == (written, []), "who gives no tools gets text"


def _finishes(job, written, finish):
    """Why a reply has ended, whole and streamed."""
    piece = a_piece(written, finish)
    (choice,) = full_reply(job, [piece])["choices"]
    return [choice["finish_reason"], Chunks(job, 0).next(piece)[-1]["choices"][0]["finish_reason"]]


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    "more", ["", "\n", " and", "<tool_c", "\n<tool_call>", '<tool_call>{"name": "ad', f"{CALL}<tool_call>{{"]
)
def test_a_reply_cut_inside_a_call_says_length(more):
    asked = read_body(Chat, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "add"}}]})
    job = Job("chat", "chatcmpl-1", 0, "tiny", 3, asked, TOKENIZER, [PROMPT], [16], None, 0.0)
    assert _finishes(job, CALL + more, "length") == ["length"] * 2
    assert _finishes(job, CALL + more, "stop") == ["tool_calls"] * 2


BAD = [
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": [[]]}, "prompt"),
    (TEXT, {"prompt": [1, -1]}, "prompt"),
    (TEXT, {"prompt": [10_000]}, "prompt"),
    (TEXT, {"prompt": "é"}, "prompt"),
    (TEXT, {"prompt": "a", "n": 0}, "n"),
    (TEXT, {"prompt": "a", "n": True}, "n"),
    (TEXT, {"prompt": "a", "temperature": 1e-9}, "temperature"),
    (TEXT, {"prompt": "a", "temperature": 10**400}, "temperature"),
    (TEXT, {"prompt": "a", "top_p": 0}, "top_p"),
    (TEXT, {"prompt": "a", "min_p": 1.5}, "min_p"),
    (GENERATE, {"token_ids": [1], "sampling_params": {"min_p": -0.1}}, "min_p"),
    (TEXT, {"prompt": "a", "stop": [""]}, "stop"),
    (TEXT, {"prompt": "a", "seed": 2**70}, "seed"),
    (TEXT, {"prompt": "a", "max_tokens": 101}, "max_tokens"),
    (TEXT, {"prompt": "a", "logprobs": 5}, "logprobs"),
    (TEXT, {"prompt": "a", "logit_bias": {"1": 5}}, "logit_bias"),
    (TEXT, {"prompt": "a", "chat_template": "x"}, "chat_template"),
    (TEXT, {"prompt": "a", "metadata": {"a": 1}}, "metadata"),
    (TEXT, {"prompt": "a" * 200}, "prompt"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    (CHAT, {"messages": HELLO, "tools": [{}]}, "tools"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"enable_thinkin": True}}, "messages"),
    (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": ["enable_thinking"]}, "chat_template_kwargs"),
    (TEXT, {"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format"),
    (GENERATE, {"token_ids": "a"}, "token_ids"),
    (GENERATE, {"token_ids": [1], "sampling_params": {"typical_p": 1}}, "typical_p"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD)
def test_what_cannot_be_served_is_refused_with_its_key(client, path, body, param):
    error = post(client, path, status=400, **body)["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error" and error["message"]


def test_a_refusal_names_the_wrong_message_and_a_remedy(client):
    wrong = [*HELLO, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]
    error = post(client, CHAT, status=400, messages=wrong)["error"]
    assert "message 1: content has {'type': 'image_url'}: takes text, or only parts of type text" in error["message"]
    error = post(client, CHAT, status=400, messages=HELLO, store=False)["error"]
    assert (
        error["message"]
        == "store = False: this server records all completions; remove it, or start the server with --norecording"
    )
    for path, more, said in (
        (
            TEXT,
            {"max_token": 3},
            "'max_token' is not supported; remove it; did you mean 'max_tokens'? This request takes",
        ),
        (TEXT, {"best_off": 1}, "'best_off' is not supported; remove it; this request takes temperature, top_p, top_k"),
        (TEXT, {"presence_penalty": 0.5}, "presence_penalty = 0.5: takes 0; other values are not supported"),
        (TEXT, {"echo": True}, "echo = True: takes False; other values are not supported"),
    ):
        message = post(client, path, status=400, prompt="a", **more)["error"]["message"]
        assert message.startswith(said) and "best_of," not in message


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"\xff", b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"prompt": "a", "temperature": NaN}'),
        *(b'{"prompt": "a", "%s": %s}' % (key, b"[" * 900 + b"]" * 900) for key in (b"stop", b"metadata", b"x")),
    ],
)
def test_a_body_that_is_none_is_refused(client, body):
    reply = client.post(TEXT, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400 and reply.json()["error"]["message"]


@pytest.mark.parametrize("key", ["chat_template_kwargs", "tools", "messages"])
@pytest.mark.parametrize("depth", [90, 900])
def test_deep_values_are_templates_or_refused(client, key, depth):
    deep = json.loads('{"a":' * depth + "1" + "}" * depth)
    call = {"type": "function", "function": {"name": "f", "parameters": deep, "arguments": deep}}
    said = {"role": "assistant", "content": "x", "tool_calls": [call]}
    more = {"chat_template_kwargs": {"enable_thinking": deep}, "tools": [call], "messages": [*HELLO, said, *HELLO]}[key]
    error = post(client, CHAT, status=200 if depth < 100 else 400, **{"messages": HELLO, "max_tokens": 1, key: more})
    assert depth < 100 or "nested more than 100 deep" in error["error"]["message"]


def test_what_else_there_is(client):
    (model,) = client.get("/v1/models").json()["data"]
    assert model == client.get("/v1/models/tiny").json() and model["id"] == "tiny" and model["policy_version"] == 3
    assert post(client, TEXT, status=404, prompt="a", model="gpt")["error"]["param"] == "model"
    assert post(client, TEXT, prompt="a", model="tiny")["model"] == "tiny"
    assert client.get("/v1/models/gpt").status_code == 404 and client.get("/health").json() == {"status": "ok"}
    missing = client.get("/v1/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
    assert client.get(TEXT).status_code == 405 and "error" in client.get(TEXT).json()
    numbers = client.get("/metrics").text
    assert 'recjax_requests_total{path="/v1/completions",status="400"}' in numbers
    assert "recjax_policy_version 3.0" in numbers and "recjax_under_way 0.0" in numbers
    assert 'path="/v1/nothing"' not in numbers, "a client does not name numbers"
    assert json.loads(client.get("/openapi.json").text)["error"], "nothing else is there"
