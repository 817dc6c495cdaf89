"""Reward functions of completions, which run in worker processes."""
