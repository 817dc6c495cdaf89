"""Tokenizers: exact round trips, stop tokens that are one token, a begin-of-sequence token never doubled."""

import datetime
import json
import pickle

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from recjax.hub.chat_rendering import render_chats
from recjax.hub.tokenizers import (
    character_tokenizer,
    encode_prompts,
    load_tokenizer,
    reads_clock,
    stop_token_ids,
)

ALPHABET = " 0123456789+=\n<>.'"
TEMPLATE = (
    "<s>{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def render_chat(tokenizer, messages):
    """One chat through its template."""
    return render_chats(tokenizer, [messages])[0]


def llama_like(adds=("<s>",), template=TEMPLATE):
    """Byte-level tokens; `<s>` begins and `</s>` ends a sequence where `adds` says so, as in Llama's tokenizer."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", "<unk>", *alphabet, "ab"])}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("a", "b")]))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    single = ["<s>"] * ("<s>" in adds) + ["$A"] + ["</s>"] * ("</s>" in adds)
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single=" ".join(single), special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )


TOKENIZER = character_tokenizer(ALPHABET)


@given(st.text(alphabet=ALPHABET.replace("<", "").replace(">", ""), min_size=1))
def test_character_tokenizer_gives_the_text_back(text):
    (ids,) = encode_prompts(TOKENIZER, [text])
    assert ids == [1 + ALPHABET.index(character) for character in text]
    assert TOKENIZER.decode(ids) == TOKENIZER.decode(ids, skip_special_tokens=True) == text


def test_character_tokenizer_special_tokens_and_save(tmp_path):
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, len(TOKENIZER)) == (0, 0, 1 + len(ALPHABET))
    assert TOKENIZER.decode([2, 0, 0], skip_special_tokens=True) == "0"
    TOKENIZER.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    text = " 1 + 2 .'\n = 3 "
    assert loaded.decode(encode_prompts(loaded, [text])[0]) == text
    assert encode_prompts(loaded, [text]) == encode_prompts(TOKENIZER, [text])


@pytest.mark.parametrize("characters", ["", "aba"])
def test_character_tokenizer_refuses(characters):
    with pytest.raises(ValueError, match="must name each character of the alphabet once"):
        character_tokenizer(characters)


@pytest.mark.parametrize("adds", [(), ("<s>",), ("<s>", "</s>")])
def test_prompts_begin_once_and_never_end(adds):
    tokenizer = llama_like(adds)
    texts = ["abc", render_chat(tokenizer, [{"role": "user", "content": "abc"}])]
    plain, chat = encode_prompts(tokenizer, texts, rendered=[False, True])
    assert encode_prompts(tokenizer, texts[1:]) == [chat], "text that begins with it does not get it twice"
    assert (plain.count(0), plain[:1] == [0]) == (("<s>" in adds), ("<s>" in adds))
    assert chat[0] == 0 and chat.count(0) == 1, "the template's own <s> stays the only one"
    assert 1 not in plain + chat
    assert tokenizer.decode(plain, skip_special_tokens=True) == "abc"


def test_prompt_errors():
    with pytest.raises(ValueError, match="prompt 1, '', has no tokens"):
        encode_prompts(TOKENIZER, ["1", ""])
    with pytest.raises(ValueError, match="prompt 0, '1×2' has text outside the tokenizer's vocabulary"):
        encode_prompts(TOKENIZER, ["1×2"])


def test_stop_tokens(tmp_path):
    tokenizer = llama_like()
    ab, newline = tokenizer.convert_tokens_to_ids(["ab", "Ċ"])
    assert stop_token_ids(tokenizer) == (1,)
    assert stop_token_ids(tokenizer, ["ab", "\n", "</s>"]) == (1, ab, newline)
    assert stop_token_ids(tokenizer, folder=tmp_path) == (1,), "no generation_config.json there"
    for eos, expected in [([1, 7, 9], (1, 7, 9, ab)), (8, (1, 8, ab)), (None, (1, ab))]:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        assert stop_token_ids(tokenizer, ["ab"], tmp_path) == expected
    (tmp_path / "config.json").write_text('{"eos_token_id": [5, 6]}')
    assert stop_token_ids(tokenizer, folder=tmp_path) == (1,), "generation_config.json comes first"
    (tmp_path / "generation_config.json").unlink()
    assert stop_token_ids(tokenizer, folder=tmp_path) == (1, 5, 6)
    (tmp_path / "generation_config.json").write_text('\ufeff{"eos_token_id": 9}')
    assert stop_token_ids(tokenizer, folder=tmp_path) == (1, 9), "a byte order mark is no damage"
    for damaged in ("{", "[]"):
        (tmp_path / "generation_config.json").write_text(damaged)
        with pytest.raises(ValueError, match="generation_config.json cannot be read .*fetch the file again"):
            stop_token_ids(tokenizer, folder=tmp_path)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("eos", [[[1, 2]], [1, [2]], "</s>", ["1"], 1.5, True, [None], {"id": 1}, -1, [2**40]])
def test_end_tokens_that_are_no_ids_are_refused(tmp_path, file, eos):
    (tmp_path / file).write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ValueError, match=rf"{file}: eos_token_id = .*: takes a token id or a list of them; correct it"):
        stop_token_ids(llama_like(), folder=tmp_path)


@pytest.mark.parametrize("text, tokens", [("abc", r"\['ab', 'c'\]"), ("", r"\[\]")])
def test_a_stop_string_must_be_one_token(text, tokens):
    with pytest.raises(ValueError, match=f"stop string '{text}' must be exactly one token, but .* {tokens}"):
        stop_token_ids(llama_like(), [text])


def test_unknown_text_is_no_stop_string():
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>")
    with pytest.raises(ValueError, match=r"stop string 'zebra' must be exactly one token, but .*\['<unk>'\]"):
        stop_token_ids(tokenizer, ["zebra"])
    with pytest.raises(ValueError, match="no end-of-sequence token; name at least one stop string"):
        stop_token_ids(tokenizer)
    assert stop_token_ids(tokenizer, ["a"]) == (1,)


def test_a_token_that_the_model_has_no_embedding_of_is_refused(tmp_path):
    llama_like().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    size = len(tokenizer)
    tokenizer.add_tokens(["<extra_a>", "<extra_b>"])
    assert encode_prompts(tokenizer, ["hi", "hi <extra_b>"])[1][-1] == size + 1
    assert len(encode_prompts(tokenizer, ["hi", "hi <extra_a>"], vocabulary=size + 1)) == 2
    message = (
        rf"prompt 8, 'hi <extra_b>': token '<extra_b>' has id {size + 1}, but the model in {tmp_path} has an embedding"
        rf" of {size} tokens and a tokenizer of {size + 2}; take the tokenizer that belongs to the weights"
    )
    for rendered in (False, True):
        with pytest.raises(ValueError, match=message):
            encode_prompts(tokenizer, ["hi", "hi <extra_b>"], 7, rendered=rendered, vocabulary=size)


def word_level(tokens):
    """A tokenizer that knows a few words and puts spaces between them, as WordPiece's do."""
    words = {word: index for index, word in enumerate(["<unk>", *tokens])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", clean_up_tokenization_spaces=True)


def test_no_version_of_transformers_cleans_up_spaces(tmp_path):
    for name, made in {"bpe": llama_like(), "words": word_level(["a", ".", "do", "n't", "?"])}.items():
        made.clean_up_tokenization_spaces = True
        made.init_kwargs["clean_up_tokenization_spaces"] = True
        made.save_pretrained(tmp_path / name)
        assert json.loads((tmp_path / name / "tokenizer_config.json").read_text())["clean_up_tokenization_spaces"]
        tokenizer, text = load_tokenizer(tmp_path / name), "do n't . a ?"
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) == text
        assert tokenizer.batch_decode([ids]) == [text]


CLOCK = "{{ strftime_now('%d %b %Y, %H:%M') }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
BRANCHES = (
    "{% if date is not defined %}{% set date = strftime_now('%A') if strftime_now is defined else '?' %}{% endif %}"
    "{% macro head() %}{{ strftime_now('%Y-%m-%d') }}{% endmacro %}{{ head() }} {{ date }}"
)


def test_a_template_that_reads_the_clock_gets_one_day(tmp_path, monkeypatch):
    for name, template in {"clock": CLOCK, "branches": BRANCHES, "plain": TEMPLATE}.items():
        llama_like(template=template).save_pretrained(tmp_path / name)
        assert reads_clock(tmp_path / name) == (name != "plain")
    # As transformers 4 wrote it.
    llama_like(template=None).save_pretrained(tmp_path / "old")
    fields = json.loads((tmp_path / "old" / "tokenizer_config.json").read_text()) | {"chat_template": CLOCK}
    (tmp_path / "old" / "tokenizer_config.json").write_text(json.dumps(fields))

    chat = [{"role": "user", "content": "hi"}]
    for name, text in {"clock": "05 Feb 2025, 00:00[hi]", "branches": "2025-02-05 Wednesday"}.items():
        assert render_chat(load_tokenizer(tmp_path / name, "2025-02-05"), chat) == text
    assert render_chat(load_tokenizer(tmp_path / "old", "2025-02-05"), chat) == "05 Feb 2025, 00:00[hi]"
    assert "chat_date" not in load_tokenizer(tmp_path / "plain", "2025-02-05").init_kwargs

    class Today(datetime.date):
        @classmethod
        def today(cls):
            return cls(2024, 7, 1)

    monkeypatch.setattr("recjax.hub.tokenizers.date", Today)
    tokenizer = load_tokenizer(tmp_path / "clock")
    monkeypatch.undo()  # the day goes by, and what this tokenizer renders stays
    assert (
        render_chat(tokenizer, chat)
        == "01 Jul 2024, 00:00[hi]"
        == render_chat(pickle.loads(pickle.dumps(tokenizer)), chat)
    )
    assert render_chat(load_tokenizer(tmp_path / "clock"), chat)[:11] == datetime.date.today().strftime("%d %b %Y")


def test_chat():
    messages = [{"role": "user", "content": "hi"}]
    assert render_chat(llama_like(), messages) == "<s>[user]hi[assistant]"
    with pytest.raises(ValueError, match="the tokenizer has no chat template; use an instruct model's"):
        render_chat(llama_like(template=None), messages)
    with pytest.raises(ValueError, match=r"refuses messages with roles \['user', 'tool'\]: no tools"):
        render_chat(llama_like(), [*messages, {"role": "tool", "content": ""}])


def test_load_errors(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="holds no tokenizer; put the model's tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ValueError, match="cannot be read .* fetch the model's tokenizer files again"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="is no local folder, and the Hugging Face hub did not serve it .* give a"):
        load_tokenizer(tmp_path / "absent")


@pytest.mark.parametrize(
    "content, package, install",
    [
        (b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02", "sentencepiece", r'"recjax\[sentencepiece\]"'),
        (b"IQ== 0\nIg== 1\n", "tiktoken", "tiktoken"),
        (b"", "sentencepiece", r'"recjax\[sentencepiece\]"'),
    ],
)
def test_a_tokenizer_model_alone_names_the_package_that_reads_it(tmp_path, monkeypatch, content, package, install):
    (tmp_path / "tokenizer.model").write_bytes(content)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=rf"tokenizer.model alone, and the package {package} .*; pip install {install},"
    ):
        load_tokenizer(tmp_path)
    llama_like().save_pretrained(tmp_path)
    assert len(load_tokenizer(tmp_path)) == len(llama_like()), "with a tokenizer.json it is not needed"
