"""Learning rates that worked, from the committed tables of runs."""
