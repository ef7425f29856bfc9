"""OpenAI's Responses API without storage: bodies to requests, answers to responses and streams."""

from .answer import ResponseWriter, response, stream, token_count
from .request import read

__all__ = ["ResponseWriter", "read", "response", "stream", "token_count"]
