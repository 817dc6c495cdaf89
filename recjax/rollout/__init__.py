"""The engine, which samples completions."""
