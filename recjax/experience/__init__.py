"""Completions on their way to the update: record, queue, batch, layout."""
