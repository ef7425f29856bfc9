"""Gated delta nets on a GPU."""
