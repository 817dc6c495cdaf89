"""Answers to "does it fit?" before training: memory, programs, topologies."""
