"""Rewards for mathematical answers: finding the answer in a completion and comparing it with the true answer.

Only text after the thoughts that is marked as the answer counts as one, so that the reward is for an answer; see
`boxed` and `tagged`.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from recjax.grading.math_equality import Explanation, explanation, is_equal, unnamed, without_thousands
from recjax.grading.notation import braced, depths, plain
from recjax.grading.quantities import quantity, same_quantity
from recjax.grading.thinking import after_thoughts, one_thought, opening_tag, whole_reply

# limits of an answer: characters, and nested brackets
LONGEST = 2000
DEEPEST = 16

_AROUND = 100  # longest text before or after a box that may belong to it
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_BARE = re.compile(r"([A-Za-z\d])(?=[.,;:!?]?(?:\s|$)|\s*(?:\$|\\[)\]]))")
_OPENED = re.compile(r"\\+$|\\boxed ?\{$")  # a backslash that was written twice, and a box around the box
_STYLES = (
    "displaystyle textstyle tiny small normalsize large Large LARGE huge Huge centering quad qquad left big Big bf"
    " approx therefore because to implies iff in Rightarrow rightarrow Longrightarrow longrightarrow Leftrightarrow"
    " Longleftrightarrow leftrightarrow equiv noindent item"
)
# The text before a step is no part of the answer.
_STEP = re.compile(
    r"\\(?:text\w*|mathrm|mbox|begin|end|color|[hv]space\*?|phantom|tag)\s*\{[^{}]*\}|\\(?:text\w*|math\w\w|boldsymbol|bm|underline)\s*\{$"
    r"|\$+|\\[()\[\],;! ]|(?:^|\n) *>?|\\\\|&|[-=]+>|(?<![<>!])=|[:→⇒⟹⟺⇔∴≈]|</?\w+>"
    rf"|\\(?:{'|'.join(_STYLES.split())})(?![A-Za-z])"
)
_WORDS = re.compile(r".*(?<![A-Za-z\\])[A-Za-z]{2,}(?![A-Za-z])|^ *\(?\w[.)] ", re.S)
_TOUCHING = re.compile(r"(?:[\d)\]}]|[+*/×·^<>≤≥≠±] ?|(?<![A-Za-z])[(\[|]|\\[A-Za-z]+ ?|(?<![A-Za-z])[A-Za-z])$")
_PARENTHESIS = re.compile(r"^ *[)\]]|(?<![\\A-Za-z])[A-Za-z]{2,}")  # a remark, or a bracket around the box
_SEPARATOR = re.compile(r" ?(?:[,;]|\\text ?\{ ?(?:or|and) ?\}|\b(?:or|and)\b) ?")
_PART = re.compile(r"(?:\^ ?\{?|_ ?\{|\\[cdt]?frac ?(?:\{[^{}]*\} ?)?\{|\\sqrt ?(?:\[[^]]*\] ?)?\{)\s*$")
_MINUS = re.compile(r"(?:(?:^|[\s:({]|\\[(\[])|[=$] ?)[-−]$|[=$] ?[-−] $")
_RAISED = re.compile(
    r"\s?(?:\\?%|°|\\degree(?![a-z])|\^ ?(?:\{[^{}]*\}|\\circ|\w))|[A-Za-z\d]+"
    r"|(?:[+/]|- ?\d|\\(?:sqrt|pi|[dt]?frac|cdot|times|pm)(?![a-z]))[^=]*$"
)
_TAGGED = re.compile(r"\s*<answer>\s*[^<>\s][^<>]*</answer>", re.S)
_ANSWER_TAG = re.compile("</?answer>")
_ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.S)
_DISPLAYED = rf"\\\[(?s:.{{0,{LONGEST}}}?)\\\]|\$\$(?s:.{{0,{LONGEST}}}?)\$\$"
_LINE = re.compile(rf"\banswer[*_]*[ \t]*[:：][*_]*\s*({_DISPLAYED}|\S.*)", re.I)
_BRACKETS = re.compile(r"\\\[(.*)\\\]|\\\((.*)\\\)|`(.*)`", re.S)
_HASHES = re.compile(r"^#### *(.+)$", re.M)


def math_reward(
    completions: Sequence[str | Sequence[Mapping[str, Any]]],
    answers: Sequence[Any],
    prompts: Sequence[Any] | None = None,
    **columns: Any,
) -> list[float]:
    r"""1 for each completion whose last \boxed equals the true answer, else 0, as `math`; TRL's signature.

    Args:
        completions: texts, or chats, whose last message is read.
        answers: true answers, each a text.
        prompts: texts, whose thinking tag at the end is read, or chats, which are ignored.
        columns: ignored.
    Raises:
        ValueError: a true answer is not a text.
    """
    for answer in answers:
        if not isinstance(answer, str):
            raise ValueError(f"answers holds {answer!r:.80}; every true answer must be a text: convert or remove it")
    if not prompts:
        prompts = [""] * len(completions)
    replies = []
    for prompt, completion in zip(prompts, completions, strict=False):
        text = completion if isinstance(completion, str) else completion[-1]["content"] or ""
        opening = opening_tag(prompt) if isinstance(prompt, str) else ""
        replies.append(whole_reply(opening, text))
    return [math(reply, answer, {})["accuracy"] for reply, answer in zip(replies, answers, strict=True)]


def is_right(answer: str, truth: str) -> bool:
    r"""True if an answer equals the true answer, as `math` decides; each is a bare answer or a text with a \boxed.

    >>> is_right("72 inches", r"6\text{ feet}"), is_right("2+3", "5")
    (True, False)
    """
    return is_equal(_short(_truth(answer)), _short(_truth(truth)) or "", finished=True)


def explain(answer: str, truth: str) -> Explanation:
    r"""The verdict of `is_right`, with its reasons: the reading of each side, and the rule that decided.

    >>> print(explain(r"So it is \boxed{\frac{2}{4}}.", "0.5"))
    right: compared as numbers with their units
      answer: \frac{2}{4} (the number 1/2)
      truth:  0.5 (the number 1/2)
    """
    return explanation(_short(_truth(answer)) or "", _short(_truth(truth)) or "")


def gsm8k(completion: str, answer: str, columns: Mapping[str, Any]) -> dict[str, float]:
    """accuracy: 1 if the marked answer is the true number, else 0.

    format: 1 if the completion is `<think>your reasoning</think> <answer>the number</answer>`, else −1.
    """
    accuracy = is_equal(tagged(completion), _truth(answer), finished=True)
    thoughts, visible_text = one_thought(completion) or ("", "")
    is_formatted = _TAGGED.fullmatch(visible_text) and not _ANSWER_TAG.search(thoughts)
    return {"accuracy": float(accuracy), "format": 1.0 if is_formatted else -1.0}


def math(completion: str, answer: str, columns: Mapping[str, Any]) -> dict[str, float]:
    r"""accuracy: 1 if the content of the last \boxed equals the true answer, else 0.

    If the true answer is a number, the box must hold a number in any notation. A computation such as 2+3 or 5^2 does
    not count, because a policy could then repeat the question instead of answering it.
    """
    return {"accuracy": float(is_equal(boxed(completion), _truth(answer), finished=True))}


def guru_math(completion: str, answer: str, columns: Mapping[str, Any]) -> dict[str, float]:
    r"""accuracy: 1 if the last \boxed is symbolically equal to the true answer, fully computed or not; else 0."""
    return {"accuracy": float(is_equal(boxed(completion), _truth(answer), finished=False))}


def check_answer(answer: str) -> None:
    """Refuses a true answer that no completion can equal.

    Raises:
        ValueError: the answer is empty, too long, or too deeply nested.
    """
    stated = _short(_truth(answer))
    if stated is None or re.fullmatch(r"(?:\\boxed|[\s${}])*", stated):
        limits = f"must hold 1 to {LONGEST} characters and brackets at most {DEEPEST} deep"
        raise ValueError(f"the answer {answer!r:.80} {limits}, or no completion is right; correct or remove its row")


def math_dapo(completion: str, answer: str, columns: Mapping[str, Any]) -> dict[str, float]:
    """accuracy: 1 if the last line `Answer: …` equals the true answer, else 0; compares answers like `math`.

    Reference: arXiv 2503.14476 (DAPO); verl's math_dapo, which gives a wrong answer the reward −1.
    """
    return {"accuracy": float(is_equal(answer_line(completion), _truth(answer), finished=True))}


def boxed(completion: str) -> str | None:
    r"""The content of the last \boxed{…} or \fbox{…}; None without a box, or if the box is empty or never closed.

    A sign, number, factor, bracket or relation right before the box, and a unit, power, factor, bracket or further
    values right after it, belong to the answer. A box in a power, index, root or fraction is no answer. Text up to
    `</think>`, and after a `<think>` that is never closed, cannot contain the answer.
    """
    text = after_thoughts(completion)
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    before = text[: boxes[-1].start()]
    after = text[boxes[-1].end() :].lstrip()
    content = braced(after)
    bare = _BARE.match(after)  # \boxed 5
    if content is None and bare:
        content = bare[1]
        after = "{" + content + "}" + after[1:]
    if _short(content) is None or _PART.search(before):
        return None
    assert content is not None
    rest_of_line = re.split(r"\$|\\[)\]]|\n", after[len(content) + 2 :][:_AROUND])[0]
    suffix = rest_of_line.rstrip(" .,;*_")
    prefix = ""
    if not suffix.lstrip().startswith("="):  # 7-5=2, and the box is around the 5
        prefix = _prefix(before)
    if prefix in ("(", "[") and _PARENTHESIS.search(suffix):
        prefix = ""
    open_brackets = [0, *depths(prefix)][-1]
    if open_brackets > 0:  # (5, 6) with a box around the 5
        return _short(f"{prefix}{content}{suffix}")
    raised = _RAISED.match(suffix)
    if raised:
        content += raised.group()
    elif _continues_list(content, suffix) or (suffix and quantity(plain(content + suffix)) is not None):
        content += suffix
    if prefix:
        return _short(f"{prefix}({content})")
    if _MINUS.search(before):
        return _short(f"-({content})")
    return _short(content)


def _continues_list(content: str, suffix: str) -> bool:
    """True if the text after a box lists more numbers, which differ from the box's number."""
    before_list, *items = _SEPARATOR.split(suffix)
    if before_list:
        return False
    numbers = [quantity(plain(item)) for item in items]
    if not numbers or None in numbers:
        return False
    first = quantity(plain(content))
    if first is None:
        return True
    # 0.5 or 1/2 is one number.
    return not all(number is not None and same_quantity(first, number) for number in numbers)


def _prefix(before: str) -> str:
    """The part of the answer right before a box, except a minus; empty for words, names and earlier steps."""
    statement = _STEP.split(_OPENED.sub("", before[-_AROUND:]))[-1]
    words = _WORDS.match(statement)
    prefix = _WORDS.sub("", statement, count=1).lstrip("{").strip(" *`~")
    if words or not re.search(r"[$(\[]$", before[: len(before) - len(statement)].rstrip()):
        # Outside of mathematics, only what touches the box belongs to the answer.
        if not _TOUCHING.search(statement):
            return ""
        return prefix
    if "," in prefix and not re.search(r"[(\[{]", prefix) and "=" in before.rpartition("$")[2]:
        prefix = prefix.rpartition(",")[2].strip()  # In x=2, y=… the box has y alone.
    if re.fullmatch(r"[-−,.]?", prefix):
        return ""
    return prefix


def tagged(completion: str) -> str | None:
    r"""The content of the last `<answer>…</answer>`, without a \boxed around it; else the last \boxed or `#### …`."""
    text = after_thoughts(completion)
    answers = _ANSWER.findall(text)
    if answers:
        return boxed(answers[-1]) or _short(answers[-1])
    if _BOX.search(text):
        return boxed(text)
    hashes = _HASHES.findall(text)
    if not hashes:
        return None
    return _short(hashes[-1])


def answer_line(completion: str) -> str | None:
    r"""The text after the last `Answer:`, on the same line or the next; for a text with \boxed, the content of the box.

    Markdown marks and TeX brackets around the answer are removed.
    """
    lines = _LINE.findall(after_thoughts(completion))
    if not lines:
        return None
    line = lines[-1].strip()
    marks = len(line) - len(line.rstrip("*_"))
    if marks and line.count(line[-1]) == marks:  # the closing marks of **Answer: 5**
        line = line[:-marks].rstrip()
    if _BOX.search(line):
        return boxed(line)
    brackets = _BRACKETS.fullmatch(line.removesuffix("."))
    if brackets:
        line = brackets[brackets.lastindex or 0]
    return _short(line)


def _truth(answer: str) -> str:
    return boxed(answer) or answer


def _short(answer: str | None) -> str | None:
    """The answer without outer spaces; None if it is empty, too long, or too deeply nested."""
    answer = (answer or "").strip()
    if not answer or len(answer) > LONGEST or max(depths(answer)) > DEEPEST:
        return None
    return answer


def parse_line(completion: str, find: Callable[[str], str | None] = answer_line) -> str | None:
    """A completion's answer in a canonical spelling: equal numbers give equal texts.

    Args:
        find: returns the answer as the completion has it, or None.
    """
    answer = find(completion)
    if answer is None:
        return None
    text = unnamed(without_thousands(plain(answer)))
    number = quantity(text)
    if number is not None and not number.percent:
        return str(number.value)
    return re.sub(r"\s", "", text)


parse_boxed = functools.partial(parse_line, find=boxed)
parse_tagged = functools.partial(parse_line, find=tagged)
