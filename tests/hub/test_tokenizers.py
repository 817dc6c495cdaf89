"""Tokenizers: exact round trips, stop tokens that are one token, a begin-of-sequence token never doubled."""

import json

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
    stop_token_ids,
    token_bytes,
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
    plain, chat = encode_prompts(tokenizer, ["abc", render_chat(tokenizer, [{"role": "user", "content": "abc"}])])
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
    for damaged in ("{", "[]"):
        (tmp_path / "generation_config.json").write_text(damaged)
        with pytest.raises(ValueError, match="generation_config.json cannot be read .*fetch the file again"):
            stop_token_ids(tokenizer, folder=tmp_path)


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


def sentencepiece_like():
    """Words with their space in front, and single bytes for other characters, as in Llama 2's tokenizer."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hi", "Hi", "a", "é"]
    pieces = [(name, -float(place)) for place, name in enumerate(names)]
    model = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0, byte_fallback=True))
    decoders = tokenizers.decoders
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("text", ["aé", "a😀b", "\U0001f468\u200d\U0001f469 ñ", " a b", "\ufffd", "\x00\n"])
def test_the_bytes_of_tokens_join_into_the_texts(text):
    tokenizer = llama_like()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(token_bytes(tokenizer, token) for token in ids) == text.encode()
    assert [token_bytes(tokenizer, token) for token in ids] == [
        b"ab" if token == len(tokenizer) - 1 else bytes([byte]) for token, byte in zip(ids, text.encode(), strict=True)
    ]
    other, fallback = sentencepiece_like(), [3 + byte for byte in text.encode()]
    assert b"".join(token_bytes(other, token) for token in fallback) == text.encode()


def test_the_bytes_of_words_have_their_space_and_special_tokens_are_their_names():
    tokenizer = sentencepiece_like()
    names = {
        "▁Hi": b" Hi",
        "Hi": b"Hi",
        "▁": b" ",
        "é": "é".encode(),
        "</s>": b"</s>",
        "<0xE9>": b"\xe9",
        "<0x41>": b"A",
    }
    for name, expected in names.items():
        assert token_bytes(tokenizer, tokenizer.convert_tokens_to_ids(name)) == expected, name
    assert token_bytes(llama_like(), 1) == b"</s>"
