"""Checkpoints: files by global name, what is written of a run into them, and read back."""
