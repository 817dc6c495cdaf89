"""Problems and their prompts, with filters by length and pass rate."""
