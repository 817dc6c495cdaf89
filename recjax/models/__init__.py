"""Language models: the decoder, weights, tokenizers."""
