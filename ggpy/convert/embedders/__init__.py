"""Checkpoints of models that make embeddings or rank documents instead of generating text."""
