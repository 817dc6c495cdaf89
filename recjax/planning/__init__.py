"""Answers to "does it fit?" before training: memory formulas, costs of programs, topologies, remedies."""
