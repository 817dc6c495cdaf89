"""Chat prompts of several model families, from text to token ids and to the token that ends a completion.

The templates are written here in the manner of each family; the last test reads SmolLM2's own.
"""

import dataclasses
import inspect
import json

import jax
import numpy as np
import pytest
import tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from experiments.smollm2 import packaged_gguf, rebuilt_tokenizer
from recjax.config.fields import _TEMPLATE_ARGUMENTS
from recjax.hub.chat_rendering import render_chats, set_template_kwargs, turn_end
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import character_tokenizer, encode_prompts, load_tokenizer, stop_token_ids
from recjax.import_experience import import_files
from recjax.models.decoder import Decoder, abstract_params
from recjax.models.decoder_config import DecoderConfig
from recjax.models.sampling import Sampling
from recjax.models.trainable import flatten, unflatten
from recjax.rollout.collecting import row_keys, sample_groups
from recjax.runs.warm_start import _demonstrations
from recjax.store.foreign import Columns
from recjax.store.stored_groups import load_groups
from recjax.tasks.problems import Problem
from recjax.tasks.prompts import encode_problems
from tests.marks import campaign_except

CHATML = """{% if messages[0].role != 'system' %}<|im_start|>system
Be helpful.<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HEADERS = """{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
INST = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif
m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% else %}{{
raise_exception('user and assistant only') }}{% endif %}{% endfor %}"""
TURNS = """{{ bos_token }}{% if messages[0].role == 'system' %}{{
raise_exception('no system role') }}{% endif %}{% for m in messages %}<start_of_turn>{{
'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""


def render_chat(tokenizer, messages):
    """One chat through its template."""
    return render_chats(tokenizer, [messages])[0]


ZEPHYR = """{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
THINKING = """{% for t in tools or [] %}<{{ t.name }}>{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}:{%
if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ effort or '' }}"""


def test_a_chats_variables_override_the_tokenizers():
    tokenizer = character_tokenizer("a")
    tokenizer.chat_template = THINKING
    chat, own = [{"role": "user", "content": "hi"}], [{}, {"enable_thinking": False}, {"tools": [{"name": "f"}]}]
    assert render_chats(tokenizer, [chat] * 3, variables=own) == ["hi:", "hi:<think></think>", "<f>hi:"]
    set_template_kwargs(tokenizer, {"enable_thinking": False, "effort": "low"})
    own = [{}, {"enable_thinking": True}, {"effort": None}]
    expected = ["hi:<think></think>low", "hi:low", "hi:<think></think>"]
    assert render_chats(tokenizer, [chat] * 3, variables=own) == expected
    own = [{"tools": [{"name": "f"}]}]
    assert render_chats(tokenizer, [chat], tools=[{"name": "g"}], variables=own) == ["<g>hi:<think></think>low"]
    assert render_chats(tokenizer, [chat]) == ["hi:<think></think>low"]


def test_variables_that_the_template_ignores_are_refused():
    tokenizer = character_tokenizer("a")
    tokenizer.chat_template = THINKING
    with pytest.raises(ValueError, match="model.chat_template_kwargs.enable_thinkin: .*does not read it"):
        set_template_kwargs(tokenizer, {"enable_thinkin": False})
    chat = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match="chat_template_kwargs.enable_thinkin: .*does not read it"):
        render_chats(tokenizer, [chat, chat], variables=[{}, {"enable_thinkin": False}])


def test_tools_that_the_template_does_not_read_are_refused():
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    problem = Problem([{"role": "user", "content": "hi"}], "1", template={"tools": [{"name": "f"}]})
    tokenizer.chat_template = THINKING
    assert encode_problems([problem], tokenizer, None).texts == ["<f>hi:"]
    tokenizer.chat_template = CHATML
    with pytest.raises(ValueError, match="reads no tools, which rows of the task have"):
        encode_problems([problem], tokenizer, None)


@dataclasses.dataclass(frozen=True)
class Family:
    """A template, what it makes of CHAT, with SYSTEM before it (None: it refuses), and the special tokens.

    `special` have the ids 0, 1, …; `eos` is the tokenizer's, `end` what the template writes after an assistant's turn,
    `listed` are the ids in generation_config.json.
    """

    template: str
    text: str
    system: str | None
    special: tuple[str, ...]
    eos: str
    end: str
    listed: tuple[int, ...]
    bos: str | None = None
    pad: str | None = None


CHAT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
]
SYSTEM = {"role": "system", "content": "Be brief."}
LLAMA_TURNS = (
    "<|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "2<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
QWEN_TURNS = (
    "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
FAMILIES = {
    "chatml": Family(
        CHATML,
        "<|im_start|>system\nBe helpful.<|im_end|>\n" + QWEN_TURNS,
        "<|im_start|>system\nBe brief.<|im_end|>\n" + QWEN_TURNS,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        eos="<|im_end|>",
        end="<|im_end|>",
        listed=(2, 0),
        pad="<|endoftext|>",
    ),
    "chatml on a base model": Family(
        CHATML,
        "<|im_start|>system\nBe helpful.<|im_end|>\n" + QWEN_TURNS,
        "<|im_start|>system\nBe brief.<|im_end|>\n" + QWEN_TURNS,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        eos="<|endoftext|>",
        end="<|im_end|>",
        listed=(0,),
    ),
    "zephyr": Family(
        ZEPHYR,
        "<|user|>\n1+1?</s>\n<|assistant|>\n2</s>\n<|user|>\n2+2?</s>\n<|assistant|>\n",
        "<|system|>\nBe brief.</s>\n<|user|>\n1+1?</s>\n<|assistant|>\n2</s>\n<|user|>\n2+2?</s>\n<|assistant|>\n",
        ("<unk>", "<s>", "</s>"),
        eos="</s>",
        end="</s>",
        listed=(2,),
        bos="<s>",
    ),
    "llama3": Family(
        HEADERS,
        "<|begin_of_text|>" + LLAMA_TURNS,
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>" + LLAMA_TURNS,
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
        ),
        eos="<|eot_id|>",
        end="<|eot_id|>",
        listed=(1, 4, 5),
        bos="<|begin_of_text|>",
    ),
    "mistral": Family(
        INST,
        "<s>[INST] 1+1?[/INST] 2</s>[INST] 2+2?[/INST]",
        None,
        ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
        eos="</s>",
        end="</s>",
        listed=(2,),
        bos="<s>",
        pad="</s>",
    ),
    "gemma": Family(
        TURNS,
        "<bos><start_of_turn>user\n1+1?<end_of_turn>\n<start_of_turn>model\n2<end_of_turn>\n"
        "<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n",
        None,
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        eos="<eos>",
        end="<end_of_turn>",
        listed=(1, 4),
        bos="<bos>",
        pad="<pad>",
    ),
}


@pytest.fixture(scope="module", params=campaign_except(FAMILIES, "chatml", "gemma"))
def chat(request, tmp_path_factory):
    """A family and its tokenizer: one token a byte after the special ones, saved to a folder and loaded again."""
    family, folder = FAMILIES[request.param], tmp_path_factory.mktemp(request.param)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*family.special, *alphabet])}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    model.add_special_tokens(list(family.special))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    if family.bos:
        begin = [(family.bos, vocabulary[family.bos])]
        model.post_processor = tokenizers.processors.TemplateProcessing(single=f"{family.bos} $A", special_tokens=begin)
    PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token=family.bos,
        eos_token=family.eos,
        pad_token=family.pad,
        chat_template=family.template,
    ).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(family.listed)}))
    return family, load_tokenizer(folder), folder


def test_messages_become_the_familys_text_and_ids(chat):
    family, tokenizer, _ = chat
    assert render_chat(tokenizer, CHAT) == family.text
    (ids,) = encode_prompts(tokenizer, [family.text], rendered=True)
    assert ids == tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == family.text
    for token, name in enumerate(family.special):
        assert ids.count(token) == family.text.count(name), f"{name} is one token"
    if family.bos:
        begin = family.special.index(family.bos)
        assert encode_prompts(tokenizer, ["2+2?"])[0].count(begin) == 1, "plain text begins with it too"
        problems = [Problem(CHAT, "4"), Problem("2+2?", "4"), Problem(CHAT, "4")]
        prompts = encode_problems(problems, tokenizer, None)
        assert prompts.tokens[0][prompts.mask[0]].tolist() == prompts.tokens[2][prompts.mask[2]].tolist() == ids
        assert prompts.tokens[1][prompts.mask[1]].tolist() == tokenizer("2+2?")["input_ids"]


def test_a_system_prompt_reaches_the_text_or_is_refused(chat):
    family, tokenizer, _ = chat
    if family.system:
        assert render_chat(tokenizer, [SYSTEM, *CHAT]) == family.system
    else:
        with pytest.raises(ValueError, match=r"refuses messages with roles \['system', 'user', .* first user message"):
            render_chat(tokenizer, [SYSTEM, *CHAT])


def favoring(vocab_size, tokens):
    """A policy that draws each of the tokens with the same probability and no other."""
    config = DecoderConfig(vocab_size, 8, 8, 1, 2, 2, 4, tie_embeddings=False)
    leaves = {path: np.zeros(leaf.shape, np.float32) for path, leaf in flatten(abstract_params(config)).items()}
    # Layers that add nothing: the final hidden state is all ones, and the head's column sums are the scores.
    leaves["embedding/embedding"] += 1
    leaves["norm/scale"] += 1
    leaves["head/kernel"] -= 100
    leaves["head/kernel"][:, tokens] = 0
    return Decoder(config), unflatten(leaves)


@pytest.mark.slow
def test_every_listed_token_ends_a_completion(chat):
    family, tokenizer, folder = chat
    stop_ids = stop_token_ids(tokenizer, folder=folder)
    assert {*stop_ids} == {*family.listed, tokenizer.eos_token_id, family.special.index(family.end)}
    said = tokenizer.convert_tokens_to_ids(["a", "b"])
    decoder, params = favoring(len(tokenizer), [*stop_ids, *said])
    prompts = encode_problems([Problem(CHAT, "4"), Problem(CHAT[:1], "2")], tokenizer, None)
    for row, text in enumerate(prompts.texts):
        assert tokenizer.decode(prompts.tokens[row][prompts.mask[row]]) == text, "an end of turn inside is no padding"

    policy = Policy(decoder, tokenizer, stop_ids)
    names = {"name": "batch", "source": "policy", "version": 0}
    groups = sample_groups(policy, params, prompts, row_keys(jax.random.key(0), 32), 16, 5, Sampling(), **names)
    ends = set()
    for completion in (completion for group in groups for completion in group.completions):
        (row,), truncated = completion.rows, completion.truncated
        tokens = row.tokens.tolist()
        first = next((time for time, token in enumerate(tokens) if token in stop_ids), None)
        assert truncated == (first is None)
        length = 5 if first is None else first + 1
        assert len(tokens) == length and row.mask.all(), "the end counts, what follows does not"
        assert completion.text == "".join("ab"[said.index(token)] for token in tokens[: length - (not truncated)])
        ends |= {tokens[length - 1]} - {*said}
    assert ends == {*stop_ids}, "each of them ended some completion"


def test_an_imported_chat_is_what_the_template_would_write(chat, tmp_path):
    family, tokenizer, folder = chat
    said = [CHAT[0], {"role": "assistant", "content": "2"}]
    rows = [{"messages": said, "reward": 1}, {"messages": said, "reward": 0, "finish_reason": "length"}]
    rows.append({"prompt": "1+1?", "completion": "2", "reward": 1})
    (tmp_path / "eot.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    import_files([tmp_path / "eot.jsonl"], tmp_path / "store", Columns())
    policy = Policy(favoring(len(tokenizer), [0])[0], tokenizer, stop_token_ids(tokenizer, folder=folder))
    found = [
        (group.prompt_tokens, one) for group in load_groups(tmp_path / "store", policy) for one in group.completions
    ]
    prompts = [prompt.tolist() for prompt, _ in found]
    completions = [one.rows[0].tokens.tolist() for _, one in found]
    end, two = family.special.index(family.end), tokenizer.encode("2", add_special_tokens=False)
    blank = tokenizer.encode(" ", add_special_tokens=False) if family.template == INST else []
    assert completions == [[*blank, *two, end], [*blank, *two], [*two, tokenizer.eos_token_id]]
    asked = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=False)
    assert prompts == [asked, asked, tokenizer("1+1?")["input_ids"]]
    whole = tokenizer.decode(tokenizer.apply_chat_template(said, return_dict=False))
    read = tokenizer.decode(prompts[0] + completions[0])
    assert whole.startswith(read)

    tokens, mask = _demonstrations(policy, ["2", "2"], [True, False])
    assert [list(row[kept]) for row, kept in zip(tokens, mask, strict=True)] == [[*two, end], completions[2]]


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (None, None),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ("{% for m in messages %}{{ m.content }}\n### {% endfor %}", None),
        ("{% for m in messages %}{{ m.content }} {{ eos_token }}{% endfor %}", 1),
        ("{% for m in messages %}{{ m.content | upper }}{{ eos_token }}{% endfor %}", None),
        ("{{ raise_exception('no chats') }}", None),
        ("{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}", None),
    ],
)
def test_the_template_writes_the_token_that_ends_turns(template, end):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", chat_template=template)
    assert turn_end(tokenizer) == end and stop_token_ids(tokenizer) == (1,)


@pytest.mark.slow
def test_smollm2s_own_template():
    gguf = pytest.importorskip("gguf")
    try:
        file = packaged_gguf()
    except ValueError as error:
        pytest.skip(str(error))
    fields = {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items() if "." in name}
    tokenizer = rebuilt_tokenizer(fields)
    assert render_chat(tokenizer, [SYSTEM, *CHAT]) == "<|im_start|>system\nBe brief.<|im_end|>\n" + QWEN_TURNS
    assert render_chat(tokenizer, CHAT).endswith(QWEN_TURNS) and "SmolLM" in render_chat(tokenizer, CHAT)
    (ids,) = encode_prompts(tokenizer, [render_chat(tokenizer, [SYSTEM, *CHAT])], rendered=True)
    assert ids.count(tokenizer.eos_token_id) == 4 and ids.count(tokenizer.bos_token_id) == 5


def test_no_argument_of_transformers_is_a_template_variable():
    parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    named = {name for name, parameter in parameters.items() if parameter.kind != parameter.VAR_KEYWORD}
    assert named - {"self"} <= _TEMPLATE_ARGUMENTS
