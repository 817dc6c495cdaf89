"""Answers to "does it fit?" before training: memory, programs and their costs, topologies."""
