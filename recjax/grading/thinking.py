"""Thoughts in a reply: the tags around them, and tags that a prompt leaves open.

Chat templates of reasoning models end a prompt with the tag that opens the thoughts, so the completion begins inside
the thoughts. Graders read `whole_reply`, which includes that tag.
"""

import re

# Opening and closing tags: DeepSeek, Qwen; EXAONE; Mistral; Sky-T1; Cohere; Kimi; Seed; Apertus; gpt-oss.
_TAGS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "[THINK]": "[/THINK]",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "◁think▷": "◁/think▷",
    "<seed:think>": "</seed:think>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "<|channel|>analysis<|message|>": "<|channel|>final<|message|>",
}
_CLOSING = frozenset(_TAGS.values())
_TAG = re.compile("|".join(map(re.escape, [*_TAGS, *_TAGS.values()])))


def opening_tag(prompt: str) -> str:
    """The thinking tag at the end of a prompt; empty if the prompt ends without one."""
    text = prompt.rstrip()
    for tag in _TAGS:
        if text.endswith(tag):
            return tag
    return ""


def whole_reply(opening: str, completion: str) -> str:
    """A completion after its prompt's last thinking tag; adds no tag if the completion repeats it."""
    if completion.lstrip().startswith(opening):
        return completion
    return opening + completion


def unclosed_tag(text: str) -> str:
    """The thinking tag that a text opens and does not close; empty if it leaves none open."""
    return _parts(text)[1]


def after_thoughts(reply: str) -> str:
    """The reply's text after its last closed thoughts and before thoughts that are never closed.

    A closing tag without an opening tag also ends thoughts. Inside thoughts, only the matching closing tag counts.
    """
    return _parts(reply)[0]


def one_thought(reply: str) -> tuple[str, str] | None:
    """The thoughts at the start of a reply, and the text after them; None unless the reply has exactly one block."""
    text = reply.strip()
    for opening, closing in _TAGS.items():
        if text.startswith(opening):
            thoughts, found, after = text.removeprefix(opening).partition(closing)
            if not found or opening in thoughts or opening in after or closing in after:
                return None
            return thoughts, after
    return None


def _parts(reply: str) -> tuple[str, str]:
    """The text after the last closed thoughts, and the thinking tag that is never closed."""
    begin = 0
    end = len(reply)
    opening = ""
    for match in _TAG.finditer(reply):
        tag = match.group()
        if opening:
            closes = tag == _TAGS[opening]
        else:
            closes = tag in _CLOSING
        if closes:
            begin = match.end()
            end = len(reply)
            opening = ""
        elif not opening:
            end = match.start()
            opening = tag
    return reply[begin:end], opening
