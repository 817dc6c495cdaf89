"""The recording server: an OpenAI-compatible API for the engine, and an experience store of all completions."""
