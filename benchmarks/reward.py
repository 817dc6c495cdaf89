"""The reward of every system: cheap, from the text only, different from row to row. Uses only the standard library."""

from collections.abc import Sequence


def vowel_share(prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Share of a completion's characters that are vowels."""
    return [sum(character in "aeiou" for character in text) / max(len(text), 1) for text in completions]
