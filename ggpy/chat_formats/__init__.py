"""How models write tool calls and reasoning, and a streaming parser that tells them from text."""
