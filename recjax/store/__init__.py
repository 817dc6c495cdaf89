"""Where completions are kept and exchanged."""
