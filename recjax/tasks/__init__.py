"""Tasks: problems, prompts and rewards."""
