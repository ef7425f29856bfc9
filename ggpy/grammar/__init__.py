"""Answers that match a JSON schema, a grammar or a regular expression: masks of allowed tokens."""
