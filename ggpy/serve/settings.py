"""The settings of a server, as values; the command line makes them.

Nothing here knows options, HTTP or the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..sampling import SamplingParams

HOST, PORT = "127.0.0.1", 8080
DRAIN_SECONDS = 30.0


@dataclass(frozen=True)
class ServerSettings:
    """Names and defaults are llama-server's, where it has them.

    hosts: addresses, or paths of unix sockets, which end in .sock. api_keys: none means that
    anybody may ask. timeout: seconds that a client may take to send a request or to read a part of
    its answer. deadline: seconds that an answer may take, None is no limit. n_waiting: sequences
    that may wait beside those that run; more are refused with 503. verbose: whether answers have
    __verbose where a request does not say. ui: a folder with a page; None is the package's own
    page.
    """

    hosts: tuple[str, ...] = (HOST,)
    port: int = PORT
    api_prefix: str = ""
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ("*",)
    aliases: tuple[str, ...] = ()  # the model's names in answers, the first of all
    tags: tuple[str, ...] = ()  # what /v1/models says of the model besides
    timeout: float = 600.0
    deadline: float | None = None
    ping_seconds: float = 30.0
    drain_seconds: float = DRAIN_SECONDS
    n_waiting: int = 1024
    max_body: int = 32 << 20
    metrics: bool = False
    slots: bool = True
    verbose: bool = False
    ui: Path | None = None
    with_ui: bool = True
    ssl_key: Path | None = None
    ssl_certificate: Path | None = None
    chat_template: str | None = None  # Jinja instead of the model's
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    tool_format: str | None = None  # a name of chat_formats instead of what its template says
    reasoning_format: str = "auto"  # "none" leaves reasoning in the text
    reasoning_budget: int = -1  # tokens; 0 turns reasoning off where the template can, -1: no limit
    reasoning_message: str = ""  # what the model says where its budget ends
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None  # where a request gives none
    pooling: str | None = None
    cache_prompt: bool = True
