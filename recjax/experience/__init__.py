"""Experience: the completions that the trainer learns from, from any source."""
