"""Checkpoints that are no models of text, but make embeddings or rank documents."""
