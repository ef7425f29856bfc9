"""Answers under way: the engine's thread, and the events that its pieces become."""
