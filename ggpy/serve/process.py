"""The server's process: the socket, uvicorn, loading the model, draining and failing.

The socket answers at once, with 503 until the model is loaded. SIGTERM lets running answers end
within a time; a second signal ends them. An engine that fails ends the process with status 1.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import uvicorn

from ..util.outcome import FAILED, Stopped
from .answers.worker import EngineWorker
from .app import Server
from .http.protocol import bounded
from .routes import make_routed_app
from .service import ModelService

if TYPE_CHECKING:
    from ..model import Model
    from .settings import ServerSettings

BACKLOG = 2048
TELL_SECONDS = 2.0  # for clients to be told that their answers end
OPEN_FILES = 65536  # connections and files that the process asks to be allowed


class ServeError(ValueError):
    """The server cannot start."""


class _Uvicorn(uvicorn.Server):
    """Starts loading once the socket answers; ends answers some time after the first signal, and at
    once after the second.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        started: Callable[[], None],
        end_answers: Callable[[], None],
        drain_seconds: float,
    ) -> None:
        super().__init__(config)
        self._tell, self._end_answers, self._drain_seconds = started, end_answers, drain_seconds
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._tell()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._drain_seconds, self._end_answers)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def handle_exit(self, sig: int, frame: Any) -> None:
        """In the main thread, between two instructions of whatever runs there."""
        again = self.should_exit
        super().handle_exit(signal.SIGTERM if again else sig, frame)  # SIGINT would tell nobody
        if again and self._loop is not None:
            self._loop.call_soon_threadsafe(self._hurry)

    def _hurry(self) -> None:
        """End all answers, and wait no longer than it takes to tell their clients."""
        self._end_answers()
        asyncio.get_running_loop().call_later(TELL_SECONDS, setattr, self, "force_exit", True)


class ServerProcess:
    """Serves one model until a signal comes, or the engine fails.

    load(): opens the model; called in a thread once the socket answers. ready(service): called when
    requests are answered.
    """

    def __init__(
        self,
        settings: ServerSettings,
        load: Callable[[], Model],
        ready: Callable[[ModelService], None] = lambda service: None,
    ) -> None:
        self.settings, self.server = settings, Server(settings)
        self._load, self._ready = load, ready
        self._error: BaseException | None = None
        self._loading: asyncio.Task[None] | None = None
        self._model: Model | None = None
        self._uvicorn = _Uvicorn(
            self._config(), self._begin_loading, self._end_answers, settings.drain_seconds
        )

    def run(self, listening: socket.socket | None = None) -> int:
        """Serve; the exit status. Raises what loading the model raises; ServeError, OSError."""
        allow_open_files()
        sock = listening or listen(self.settings)
        try:
            with suppress(KeyboardInterrupt, Stopped):  # uvicorn has done what a signal asks for
                self._uvicorn.run([sock])
        finally:
            sock.close()
            self._close()
            if self.settings.socket:
                with suppress(OSError):
                    os.unlink(self.settings.socket)
        if self._error is not None:
            raise self._error
        return FAILED if self.server.failure is not None else 0

    def stop(self) -> None:
        """Let running answers end, then stop; from any thread."""
        self._uvicorn.should_exit = True

    def _config(self) -> uvicorn.Config:
        settings = self.settings
        tls: dict[str, Any] = {}
        if settings.ssl_key and settings.ssl_certificate:
            tls = {"ssl_keyfile": settings.ssl_key, "ssl_certfile": settings.ssl_certificate}
        return uvicorn.Config(
            make_routed_app(self.server),
            http=bounded(),
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            backlog=BACKLOG,
            timeout_keep_alive=int(min(max(settings.timeout, 1), 75)),
            timeout_graceful_shutdown=int(settings.drain_seconds + TELL_SECONDS + 1),
            server_header=False,
            proxy_headers=False,
            **tls,
        )

    # The model

    def _begin_loading(self) -> None:
        self._loading = asyncio.get_running_loop().create_task(self._serve_model())

    async def _serve_model(self) -> None:
        """Load the model in a thread, then answer requests."""
        try:
            model = await asyncio.to_thread(self._load)
            self._model = model
            loop = asyncio.get_running_loop()
            worker = EngineWorker(model.engine, loop, self.settings.n_waiting, self._failed)
            service = await asyncio.to_thread(ModelService, model, self.settings, worker)
        except BaseException as error:
            self._error = error
            self.stop()
            return
        self.server.service = service
        self._ready(service)

    def _failed(self, error: BaseException) -> None:
        """The engine cannot go on: tell everybody, then end."""
        self.server.failure = error
        print(f"ggpy serve: error: the engine failed: {error}", file=sys.stderr, flush=True)
        self.stop()

    def _end_answers(self) -> None:
        """Tell the clients of running answers that the server stops."""
        if self.server.service is not None:
            self.server.service.worker.stop()

    def _close(self) -> None:
        if self.server.service is not None:
            self.server.service.worker.close()
        if self._model is not None:
            with suppress(RuntimeError):
                self._model.close()


def listen(settings: ServerSettings) -> socket.socket:
    """The listening socket; ServeError says why there is none."""
    if settings.socket:
        _remove_stale(settings.socket)
        sock = socket.socket(socket.AF_UNIX)
        where: Any = settings.socket
    else:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        sock = socket.socket(family)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        where = (settings.host, settings.port)
    try:
        sock.bind(where)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        shown = settings.socket or f"{settings.host}:{settings.port}"
        raise ServeError(f"cannot listen on {shown}: {error.strerror or error}") from None
    return sock


def _remove_stale(path: str) -> None:
    """Remove the socket of a server that was killed: nobody answers there."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def allow_open_files() -> None:
    """Raise the limit of open files as far as the system lets us: each connection is one."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
