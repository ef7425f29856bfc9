"""Anthropic's Messages API: bodies to requests, answers to messages and streams of events."""

from .answer import PING, MessageWriter, error_body, message, stream, token_count
from .request import read

__all__ = ["PING", "MessageWriter", "error_body", "message", "read", "stream", "token_count"]
