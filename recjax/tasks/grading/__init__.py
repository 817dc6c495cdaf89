"""Rewards of completions; worker processes grade completions for the built-in rewards."""
