"""The recording server: the engine behind OpenAI's API, and an experience store of all that it serves."""
