"""Models of the Hugging Face format in and out: families, weights, tokenizers, adapters, export."""
