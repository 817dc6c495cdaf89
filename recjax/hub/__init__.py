"""Hugging Face models: reading and writing configs, weights, tokenizers and adapters."""
