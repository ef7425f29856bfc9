"""The specification: every op in float32 numpy."""
