"""Reasoning before an answer: its budget, its limit in a chat, and the form of what follows it."""
