"""Other servers that sample for a run."""
