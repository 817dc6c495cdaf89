"""Tokenizers: exact round trips, stop tokens that are one token, a begin-of-sequence token never doubled."""

import datetime
import json
import pickle

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from recjax.hub.chat_rendering import render_chats
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import (
    LONG_TEXT,
    character_tokenizer,
    decode_after,
    decode_each_after,
    encode_after,
    encode_prompts,
    load_tokenizer,
    reads_clock,
    stop_token_ids,
    token_bytes,
    token_texts,
)
from recjax.hub.weights import read_config
from recjax.models.decoder import Decoder
from recjax.models.decoder_config import DecoderConfig
from recjax.store.tokenize import tokenized
from tests.experience.rows import text_row

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


def sentencepiece_like(kind="prepend", characters="42Yesx=+.:é", template=None, codes=range(256)):
    """Pieces with "▁" for a space, which begins every text, and bytes for characters that are no pieces.

    Args:
        kind: prepend, as Llama 2's tokenizer; first, as that of later Mistral models; always; or unigram.
    """
    merged = ["42", "▁4", "▁42", "Ye", "Yes", "▁Yes", "▁▁", "▁x", "=4"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in codes), "▁", *characters, *merged]
    if kind == "unigram":
        scores = [(piece, -1.0 - place / 1000) for place, piece in enumerate(pieces)]
        model = tokenizers.models.Unigram(scores, unk_id=0, byte_fallback=True)
    else:
        pairs = [("4", "2"), ("▁", "42"), ("▁", "4"), ("Y", "e"), ("Ye", "s"), ("▁", "Yes"), ("▁", "▁")]
        pairs += [("▁", "x"), ("=", "4")]
        pairs += [(one, other) for one, other in [("s", "s")] if one + other in pieces]
        vocabulary = {piece: place for place, piece in enumerate(pieces)} | {"e": pieces.index("e")}
        model = tokenizers.models.BPE(vocabulary, pairs, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    made, normalizers = tokenizers.Tokenizer(model), tokenizers.normalizers
    if kind == "prepend":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        scheme = "always" if kind == "unigram" else kind
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = tokenizers.decoders
    made.decoder = steps.Sequence([steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **special)


SENTENCEPIECES = {kind: sentencepiece_like(kind) for kind in ("prepend", "first", "always", "unigram")}
TOKENIZER = character_tokenizer(ALPHABET)
IN_CONTEXT = SENTENCEPIECES | {"bytes": llama_like(), "characters": character_tokenizer("42Yesx=+.: \né€")}


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
    with pytest.raises(ValueError, match="must name each character once"):
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


class Loud(PreTrainedTokenizerFast):
    """Decodes and encodes in capital letters."""

    def _decode(self, *arguments, **options):
        return super()._decode(*arguments, **options).upper()

    def _encode_plus(self, text, **options):
        return super()._encode_plus(text.upper(), **options)


def test_texts_equal_transformers_in_any_tokenizer_state():
    tokenizer = llama_like()
    text, ids = "</s>ab é", [1, 259, 3, 4]
    expected = tokenizer.encode(text, add_special_tokens=False), tokenizer.decode(ids)
    tokenizer.pad_token = "</s>"
    tokenizer("a", padding="max_length", truncation=True, max_length=2)  # stays in the library's tokenizer
    assert (encode_after(tokenizer, (), text), decode_after(tokenizer, (), ids)) == expected
    assert encode_prompts(tokenizer, [text]) == [[0, *expected[0]]]
    tokenizer.split_special_tokens = True
    assert encode_after(tokenizer, (), "</s>") == tokenizer.encode("</s>", add_special_tokens=False) != [1]
    loud = Loud(tokenizer_object=llama_like().backend_tokenizer, bos_token="<s>", eos_token="</s>")
    assert decode_after(loud, (), encode_after(loud, (), "ab")) == "AB"


def test_prompt_errors():
    with pytest.raises(ValueError, match="prompt 1, '', has no tokens"):
        encode_prompts(TOKENIZER, ["1", ""])
    with pytest.raises(ValueError, match="prompt 0, '1×2' has text outside the tokenizer's vocabulary: '×'"):
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
        with pytest.raises(ValueError, match="generation_config.json: cannot be read .*fetch the file again"):
            stop_token_ids(tokenizer, folder=tmp_path)


@pytest.mark.parametrize("name", SENTENCEPIECES)
def test_stop_tokens_in_the_middle_of_a_text(name):
    tokenizer = SENTENCEPIECES[name]
    ids = tokenizer.convert_tokens_to_ids(["</s>", "<0x0A>", "42", "▁42", "<0x09>", "▁"])
    assert [*stop_token_ids(tokenizer, ["\n", "42", " 42", "</s>", "\t", " "])] == ids
    with pytest.raises(ValueError, match=r"stop string '4x': must be exactly one token, but .* \['4', 'x'\]"):
        stop_token_ids(tokenizer, ["4x"])
    with pytest.raises(ValueError, match="stop string '€': must be exactly one token"):
        stop_token_ids(tokenizer, ["€"])


WORDS = st.lists(st.sampled_from(["42", " ", "Yes", "\n", "x=", "é", "€", "4", "..", "  "]), max_size=6).map("".join)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_CONTEXT)
@given(st.data())
def test_a_text_goes_on_where_another_ends(name, data):
    tokenizer = IN_CONTEXT[name]
    first, *texts = data.draw(st.lists(WORDS.filter(bool), min_size=2, max_size=5))
    first = first.lstrip() or "x"  # a space at the beginning of a text is lost by some
    (ids,) = encode_prompts(tokenizer, [first])
    for text in texts:
        more = encode_after(tokenizer, ids, text)
        assert decode_after(tokenizer, ids, more) == text
        assert text.isascii() <= ("".join(token_texts(tokenizer, more)) == text)
        ids = [*ids, *more]
    read = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert read == first + "".join(texts)


@pytest.mark.parametrize("name", IN_CONTEXT)
def test_texts_of_many_completions_are_those_of_each(name):
    """Also of tokens that end in the middle of a character, or follow the middle of one."""
    tokenizer = IN_CONTEXT[name]
    ids = np.random.default_rng(0).integers(0, len(tokenizer), 12).tolist()
    cuts = [(start, end) for start in range(len(ids)) for end in range(start + 1, len(ids) + 1)]
    before = [np.array(ids[:start], np.int32) for start, _ in cuts]
    tokens = [np.array(ids[start:end], np.int32) for start, end in cuts]
    each = [decode_after(tokenizer, *pair) for pair in zip(before, tokens, strict=True)]
    assert decode_each_after(tokenizer, before, tokens) == each


@pytest.mark.parametrize("name", IN_CONTEXT)
def test_tokenizers_differ_at_the_beginning_of_a_text(name):
    tokenizer = IN_CONTEXT[name]
    (alone,) = encode_prompts(tokenizer, ["Yes"])
    words = tokenizer.encode("Yes", add_special_tokens=False)
    begin = alone[: len(alone) - len(words)]
    assert encode_after(tokenizer, begin or [], "Yes") in (words, words[-1:])
    assert decode_after(tokenizer, begin, words) == "Yes"
    if name in SENTENCEPIECES:
        assert tokenizer.convert_ids_to_tokens(words) == ["▁Yes"]
        assert encode_after(tokenizer, [1], "Yes") == words, "after <s> alone a text begins"
        # Behind a special token in the middle, texts are read as the tokenizer reads the whole text.
        ids, end = encode_prompts(tokenizer, ["x"])[0], [2]
        after = encode_after(tokenizer, [*ids, *end], "Yes")
        assert [*ids, *end, *after] == encode_prompts(tokenizer, ["x</s>Yes"])[0]
        assert decode_after(tokenizer, [*ids, *end], after) == "Yes"


def test_stored_completions_continue_their_prompts():
    """Whether a space stands between them is for the text to say, or the chat template."""
    chat = "{% for m in messages %}{{ '4 ' + m.content + '.' if m.role == 'user' else ' ' + m.content }}{% endfor %}"
    for template, first in ((chat, "▁42"), (chat.replace("' ' + ", ""), "42")):
        tokenizer = sentencepiece_like(template=template)
        policy = Policy(Decoder(DecoderConfig(len(tokenizer), 16, 32, 1, 2, 1, 8)), tokenizer, (2,))
        messages = [{"role": "user", "content": "x="}]
        rows = [text_row(0, prompt="x=", completion=text) for text in ("42", " 42")]
        rows += [text_row(0, messages=messages, completion="42")]
        tokens = [one.completion.rows[0].tokens for one in tokenized(rows, policy)]
        pieces = [tokenizer.convert_ids_to_tokens(ids) for ids in tokens]
        assert pieces == [["42", "</s>"], ["▁42", "</s>"], [first, "</s>"]]


@pytest.mark.parametrize("name", ["prepend", "unigram", "bytes"])
def test_a_character_may_come_in_parts(name):
    tokenizer = IN_CONTEXT[name]
    ids = encode_prompts(tokenizer, ["x" * 40 + "€" * 40])[0]
    assert decode_after(tokenizer, ids[:-1], ids[-1:]) == "€"
    more = encode_after(tokenizer, ids, "€4")
    for count in range(1, 4):
        text = decode_after(tokenizer, ids, more[:count])
        assert text.strip("\ufffd") == ("€" if count == 3 else "") and (count == 3) == ("\ufffd" not in text)
    # The context may begin within a character.
    assert decode_after(tokenizer, ids, more) == "€4"


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("eos", [[[1, 2]], [1, [2]], "</s>", ["1"], 1.5, True, [None], {"id": 1}, -1, [2**40]])
def test_end_tokens_that_are_no_ids_are_refused(tmp_path, file, eos):
    (tmp_path / file).write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ValueError, match=rf"{file}: eos_token_id = .*: takes a token id or a list of them; correct it"):
        stop_token_ids(llama_like(), folder=tmp_path)


@pytest.mark.parametrize(("text", "tokens"), [("abc", r"\['ab', 'c'\]"), ("", r"\[\]")])
def test_a_stop_string_must_be_one_token(text, tokens):
    with pytest.raises(ValueError, match=f"stop string '{text}': must be exactly one token, but .* {tokens}"):
        stop_token_ids(llama_like(), [text])


def test_unknown_text_is_no_stop_string():
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>")
    with pytest.raises(ValueError, match=r"stop string 'zebra': must be exactly one token, but .*\['<unk>'\]"):
        stop_token_ids(tokenizer, ["zebra"])
    with pytest.raises(ValueError, match="no end-of-sequence token; name at least one stop string"):
        stop_token_ids(tokenizer)
    assert stop_token_ids(tokenizer, ["a"]) == (1,)


def test_tokens_without_an_embedding_are_refused(tmp_path):
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
    with pytest.raises(ValueError, match="cannot be read .* fetch its files again"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="is no local folder, and the Hugging Face hub did not serve it .* give a"):
        load_tokenizer(tmp_path / "absent")


def byte_fallback_like():
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
    other, fallback = byte_fallback_like(), [3 + byte for byte in text.encode()]
    assert b"".join(token_bytes(other, token) for token in fallback) == text.encode()


def test_token_bytes_have_spaces_and_special_names():
    tokenizer = byte_fallback_like()
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


@pytest.mark.parametrize(
    ("content", "package"),
    [
        (b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02", "sentencepiece"),
        (b"IQ== 0\nIg== 1\n", "tiktoken"),
        (b"", "sentencepiece"),
    ],
)
def test_tokenizer_model_alone_names_the_missing_package(tmp_path, monkeypatch, content, package):
    (tmp_path / "tokenizer.model").write_bytes(content)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = rf"only as tokenizer.model, and the package {package} .*; pip install {package},"
    with pytest.raises(ValueError, match=words):
        load_tokenizer(tmp_path)
    llama_like().save_pretrained(tmp_path)
    assert len(load_tokenizer(tmp_path)) == len(llama_like()), "with a tokenizer.json it is not needed"


@pytest.mark.parametrize("text", ["a" * 24 + "b", "b" * LONG_TEXT + "a" * 24 + "b"])
def test_a_slow_pattern_is_an_error_for_the_text(text):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, "<unk>"))
    pattern = tokenizers.Regex("(a+)+$")
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, "isolated")
    fuse = tokenizers.decoders.Fuse()
    made.decoder = tokenizers.decoders.Sequence([fuse, tokenizers.decoders.Replace(pattern, "x"), fuse])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    with pytest.raises(
        ValueError, match="prompt 3, '[ab]+' makes the tokenizer in memory fail .Onig.*at a pattern in token"
    ):
        encode_prompts(tokenizer, [text], 3)
    with pytest.raises(ValueError, match="text '[ab]+' makes the tokenizer in memory fail"):
        encode_after(tokenizer, [1], text)
    with pytest.raises(ValueError, match="text of 25 tokens makes the tokenizer"):
        decode_after(tokenizer, (), [1] * 24 + [2])
    assert encode_prompts(tokenizer, ["a"]) == [[1]] and decode_after(tokenizer, (), [2]) == "b"


def test_other_threads_run_while_a_long_text_is_tokenized(monkeypatch):
    """`encode` of the Rust tokenizer holds Python's global lock, and `encode_batch` does not."""
    tokenizer, text = character_tokenizer("ab"), "ab" * LONG_TEXT
    backend = tokenizer.backend_tokenizer

    class Backend:
        def encode(self, text, **options):
            assert len(text) <= LONG_TEXT
            return backend.encode(text, **options)

        encode_batch = staticmethod(backend.encode_batch)

    monkeypatch.setattr("recjax.hub.tokenizers._backend", lambda _: Backend())
    assert encode_prompts(tokenizer, [text, text[:9]]) == [[1, 2] * LONG_TEXT, [1, 2, 1, 2, 1, 2, 1, 2, 1]]


def test_a_far_too_large_config_is_refused_quickly(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": list(range(10**6))}))
    for load in (load_tokenizer, read_config):
        with pytest.raises(ValueError, match="config.json: has 7888908 bytes, .* 262144 at most; .* eos_token_id"):
            load(tmp_path)
