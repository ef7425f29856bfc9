"""Sequences in flight: pages, batches, and the engine that owns them."""
