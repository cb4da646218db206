"""Texts and tokens: reading them, tokenizers, and the batches that are drawn from a text."""
