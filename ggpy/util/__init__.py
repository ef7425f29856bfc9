"""Modules that every other folder may import: progress, errors, output files, text for messages."""
