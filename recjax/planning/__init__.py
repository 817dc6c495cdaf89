"""What answers "does it fit?" before anything is trained: memory formulas, programs' costs, topologies, remedies."""
