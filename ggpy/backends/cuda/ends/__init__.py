"""The end of a layer: its own input, and its scale."""
