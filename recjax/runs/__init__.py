"""Opens a run or a policy, with its folder."""
