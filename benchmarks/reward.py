"""The reward of every system: cheap, of the text alone, and different from row to row. The standard library alone."""

from collections.abc import Sequence


def vowel_share(prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Share of a completion's characters that are vowels."""
    return [sum(character in "aeiou" for character in text) / max(len(text), 1) for text in completions]
