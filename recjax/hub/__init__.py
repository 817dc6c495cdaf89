"""Hugging Face folders in and out: configs, weights, tokenizers, adapters, chat templates."""
