"""Answers that are several messages, each with a header: of gpt-oss, of Muse Glimmer."""
