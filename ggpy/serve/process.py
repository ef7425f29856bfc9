"""The server's process: the socket, uvicorn, loading the model, draining and failing.

The socket answers at once, with 503 until the model is loaded. SIGTERM, SIGHUP or Ctrl-C lets
running requests end within a time; a second signal ends them with an error, a third the process. An
engine that fails ends the process with status 1.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from ..util.outcome import FAILED, INTERRUPTED
from .answers.worker import EngineWorker
from .app import Server
from .http.protocol import bounded
from .routes import make_routed_app
from .service import ModelService

if TYPE_CHECKING:
    from ..model import Model
    from .settings import ServerSettings

BACKLOG = 2048
OPEN_FILES = 65536  # connections and files that the process asks to be allowed
LAST_SECONDS = 1.0  # that clients have to read the end of what was ended
# Seconds after which a thread that runs Python lets another one run. With Python's 5 ms the engine
# waits for the event loop at every call of the driver while many streams are written.
SWITCH_INTERVAL = 0.0002


class ServeError(ValueError):
    """The server cannot start."""


class _Uvicorn(uvicorn.Server):
    """Starts loading once the socket answers, drains at the end, and counts signals."""

    def __init__(
        self,
        config: uvicorn.Config,
        started: Callable[[], None],
        drain: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(config)
        self._tell, self._drain = started, drain
        self.n_signals, self.n_most = 0, 2  # signals that came, and that are answered in order

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._tell()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.gather(super().shutdown(sockets), self._drain())

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGHUP, by which a terminal ends, is answered as uvicorn answers the others, unless it is
        ignored (`nohup`).
        """
        number = getattr(signal, "SIGHUP", None)
        in_main = threading.current_thread() is threading.main_thread()
        if not in_main or number is None or signal.getsignal(number) is signal.SIG_IGN:
            number = None
        with super().capture_signals():
            before = None if number is None else signal.signal(number, self.handle_exit)
            try:
                yield
            finally:
                if number is not None:
                    signal.signal(number, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Count a signal. uvicorn would raise it again in the end."""
        self.n_signals += 1
        self.should_exit = True
        if self.n_signals > self.n_most:
            os._exit(INTERRUPTED)


class ServerProcess:
    """Serves one model until a signal comes, or the engine fails.

    load(): opens the model; called in a thread once the socket answers. ready(service): called when
    requests are answered. say(text): tells the user how the server ends.
    """

    def __init__(
        self,
        settings: ServerSettings,
        load: Callable[[], Model],
        ready: Callable[[ModelService], None] = lambda service: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.settings, self.server = settings, Server(settings)
        self._load, self._ready, self._say = load, ready, say
        self._error: BaseException | None = None
        self._loading: asyncio.Task[None] | None = None
        self._model: Model | None = None
        self._uvicorn = _Uvicorn(self._config(), self._begin_loading, self._drain)

    def run(self, listening: Sequence[socket.socket] = ()) -> int:
        """Serve; the exit status. listening: none is those of the settings. Raises what loading the
        model raises; ServeError, OSError.
        """
        allow_open_files()
        sys.setswitchinterval(SWITCH_INTERVAL)
        sockets = [*listening] or listen(self.settings)
        files = [Path(sock.getsockname()) for sock in sockets if _has_file(sock)]
        try:
            self._uvicorn.run(sockets)
        finally:
            close_all(sockets)
            for path in files:  # whose sockets uvicorn closed
                path.unlink(missing_ok=True)
            self._close()
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
            http=bounded(settings.timeout),
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            backlog=BACKLOG,
            timeout_keep_alive=int(min(max(settings.timeout, 1), 75)),
            timeout_graceful_shutdown=None,  # _drain bounds the time
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
        if not self._uvicorn.should_exit:
            self._ready(service)

    def _failed(self, error: BaseException) -> None:
        """The engine cannot go on: tell everybody, then end."""
        self.server.failure = error
        print(f"ggpy serve: error: the engine failed: {error}", file=sys.stderr, flush=True)
        self.stop()

    async def _drain(self) -> None:
        """Let requests end for a time, or until a second signal; then end them with an error."""
        await self._loaded()
        now, state = asyncio.get_running_loop().time, self._uvicorn.server_state
        n, seconds = len(state.tasks), self.settings.drain_seconds
        if n and self.server.failure is None:
            told = "request" if n == 1 else "requests"
            with suppress(OSError):  # a terminal that is gone
                self._say(f"stopping: {n} {told} may go on for {seconds:g} s; Ctrl-C ends them now")
        until = now() + seconds
        while state.tasks and self._uvicorn.n_signals < 2 and now() < until:
            await asyncio.sleep(0.05)
        if self.server.service is not None:
            await asyncio.to_thread(self.server.service.worker.close)
        until = now() + LAST_SECONDS
        while state.connections and now() < until:
            await asyncio.sleep(0.05)
        for connection in list(state.connections):
            connection.transport.abort()

    async def _loaded(self) -> None:
        """Wait for the model, if it is being loaded: the thread that does it cannot be stopped."""
        if self._loading is None or self._loading.done():
            return
        self._uvicorn.n_most = 1
        with suppress(OSError):
            self._say("stopping, once the model is loaded; Ctrl-C leaves now")
        await asyncio.wait([self._loading])
        self._uvicorn.n_most = 2

    def _close(self) -> None:
        if self.server.service is not None:
            self.server.service.worker.close()
        if self._model is not None:
            with suppress(RuntimeError):
                self._model.close()


def listen(settings: ServerSettings) -> list[socket.socket]:
    """A listening socket of each host; ServeError says why there is none. If the port is 0, the
    first address takes a free one, which the others share.
    """
    sockets: list[socket.socket] = []
    port = settings.port
    try:
        for host in settings.hosts:
            if is_path(host):
                sockets.append(_listen_at_path(host))
            else:
                sockets.append(_listen_at(host, port, alone=len(settings.hosts) == 1))
                port = sockets[-1].getsockname()[1]
    except BaseException:
        close_all(sockets)
        raise
    return sockets


def is_path(host: str) -> bool:
    """Whether a host is the path of a unix socket, as for llama-server."""
    return host.endswith(".sock")


def _listen_at_path(path: str) -> socket.socket:
    remove_left_over(path)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(path)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        told = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            told = "a server listens there, or it is another file: give another path"
        raise ServeError(f"cannot listen on {path}: {told}") from None
    return sock


def _listen_at(host: str, port: int, alone: bool) -> socket.socket:
    """alone: there is no other address, so that :: may stand for those of IPv4, too."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if sock.family == socket.AF_INET6 and not alone:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ServeError(f"cannot listen on {host}:{port}: {_reason(error)}") from None
    return sock


def _has_file(sock: socket.socket) -> bool:
    return sock.family not in (socket.AF_INET, socket.AF_INET6)


def close_all(sockets: Sequence[socket.socket]) -> None:
    """Close listening sockets, and remove the files of those that have one."""
    for sock in sockets:
        if sock.fileno() >= 0 and _has_file(sock):
            Path(sock.getsockname()).unlink(missing_ok=True)
        sock.close()


def remove_left_over(path: str) -> None:
    """Remove a socket that a process left behind which is gone: nobody answers there."""
    if not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
        except OSError:  # bind says what is wrong
            pass


def _reason(error: OSError) -> str:
    """Why a socket cannot be bound, and what to do."""
    remedies = {
        errno.EADDRINUSE: "it is in use: give another --port, or 0 for a free one",
        errno.EACCES: "it is not allowed: give a --port from 1024 on",
        errno.EADDRNOTAVAIL: "this machine has no such address: give another --host",
    }
    return remedies.get(error.errno or 0, error.strerror or str(error))


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
