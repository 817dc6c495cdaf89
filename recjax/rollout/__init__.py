"""Drawing completions from a policy."""
