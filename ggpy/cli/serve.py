"""`ggpy serve`: read the options, listen, load the model, serve until a signal comes.

Options become values here. Remarks go to stderr. Modules that take time to import are imported
when they are needed, so that --help and mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import json
import time
from codecs import BOM_UTF8
from errno import ENOENT
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import hub
from ..util.messages import escaped
from ..util.outcome import ended
from ..util.progress import Bar
from . import options as run_options
from . import prompts, sampling_options, serve_options
from .run import chat_template, is_bug, note, say, since

if TYPE_CHECKING:
    from ..gguf import File
    from ..model import Model
    from ..runtime.engine import Engine
    from ..serve.service import ModelService
    from ..serve.settings import ServerSettings

PACKAGES = (  # of the extra `server`, as they are imported
    "starlette",
    "uvicorn",
    "markdown_it",
    "mdit_py_plugins",
    "pygments",
    "latex2mathml",
)
OPEN_TO_ALL = ("0.0.0.0", "::")
N_PARALLEL = {"gpu": 64, "cpu": 4}
PREFILL_TOKENS = {"gpu": 512, "cpu": 128}
N_CTX_CPU = 16384  # positions, where neither the user nor the model asks for fewer
LEAST_CTX = 4096  # positions that a context which does not fit is not shrunk below


class ServerPackagesMissing(ValueError):
    """The extra `server` is not installed."""


def main(arguments: list[str] | None = None) -> int:
    """Run the program; its exit status."""
    options = serve_options.parse(arguments)
    return ended(
        lambda: serve(options),
        is_bug=lambda error: options.verbose or is_bug(error),
        program=serve_options.PROGRAM,
    )


def serve(options: argparse.Namespace) -> int:
    """Do what the options say; ValueError, OSError or MemoryError where that cannot be done."""
    if not options.hf_repo:
        hub.find(options.model)
    settings = server_settings(options)
    need_packages()
    from ..serve.process import ServerProcess, close_all, is_path, listen

    path = hub.fetch_from_hub(options.hf_repo) if options.hf_repo else hub.resolve(options.model)
    sockets = listen(settings)
    try:
        places = zip(settings.hosts, sockets, strict=True)
        found = {host: address(settings, host, sock.getsockname()) for host, sock in places}
        where = next((a for host, a in found.items() if not is_path(host)), "")
        say(f"listening: {', '.join(found.values())}; the status is 503 until the model is loaded")
        if {*settings.hosts} & {*OPEN_TO_ALL} and not settings.api_keys:
            note("no --api-key is set, so everybody in the network may ask")

        def ready(service: ModelService) -> None:
            say(*described(service.engine))
            if settings.with_ui and where:
                say(f"page: {where}/")
            base = f"{where}/v1" if where else ", ".join(found.values())
            say(f"ready: clients use {base}; Ctrl-C stops the server")

        return ServerProcess(settings, lambda: load(path, options), ready, say).run(sockets)
    finally:
        close_all(sockets)


def need_packages() -> None:
    """ServerPackagesMissing, unless the packages of the extra `server` are there."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ServerPackagesMissing(
            f"the server needs packages that are not installed ({', '.join(missing)}): "
            "pip install 'ggpy[server]'"
        )


def described(engine: Engine) -> list[str]:
    """What the engine has for answers."""
    from ..backends.interface import PAGE_SIZE

    n_positions = max(pool.n_pages for pool in engine.cache.pools) * PAGE_SIZE
    each = f", and one may have {engine.n_ctx}" if engine.n_ctx < n_positions else ""
    return [
        f"answers: {engine.n_seq} at a time; more wait",
        f"context: {n_positions} tokens, which all answers share{each}",
    ]


def address(settings: ServerSettings, host: str, bound: Any) -> str:
    """Where a client finds the server, of one of its hosts."""
    if isinstance(bound, str):
        return f"unix:{bound}"
    host = f"[{host}]" if ":" in host else host
    scheme = "https" if settings.ssl_key else "http"
    return f"{scheme}://{host}:{bound[1]}{settings.api_prefix}"


# Options as values


def server_settings(options: argparse.Namespace) -> ServerSettings:
    """What the options say of the server; ValueError, OSError."""
    from .. import chat_formats
    from ..sampling import SamplingParams
    from ..serve.settings import ServerSettings

    check_certificate(options.ssl_key_file, options.ssl_cert_file)
    if options.tool_format:  # before the model is loaded, which takes time
        chat_formats.by_name(options.tool_format)
    return ServerSettings(
        hosts=hosts(options.host),
        port=options.port,
        verbose=options.verbose,
        api_prefix=options.api_prefix.rstrip("/"),
        api_keys=api_keys(options),
        cors_origins=listed(options.cors_origins),
        aliases=listed(options.alias),
        tags=listed(options.tags),
        timeout=float(options.timeout),
        deadline=options.deadline,
        ping_seconds=float(options.sse_ping_interval),
        drain_seconds=float(options.drain),
        n_waiting=options.queue,
        metrics=options.metrics,
        slots=options.slots,
        ui=Path(options.ui) if options.ui else None,
        with_ui=not options.no_ui,
        ssl_key=Path(options.ssl_key_file) if options.ssl_key_file else None,
        ssl_certificate=Path(options.ssl_cert_file) if options.ssl_cert_file else None,
        chat_template=chat_template(options),
        template_variables=template_variables(options),
        tool_format=options.tool_format,
        reasoning_format=options.reasoning_format,
        reasoning_budget=0 if options.reasoning == "off" else options.reasoning_budget,
        reasoning_message=options.reasoning_budget_message,
        sampling=SamplingParams(**sampling_options.sampling(options)),
        max_tokens=options.predict if options.predict >= 0 else None,
        pooling=options.pooling,
        cache_prompt=options.cache_prompt,
    )


def hosts(text: str) -> tuple[str, ...]:
    """The addresses of --host, each once, and paths of unix sockets without what may stand before
    them; ValueError where there is none.
    """
    found = listed(text)
    if not found:
        raise ValueError("--host has no address: give one, as 127.0.0.1")
    plain = (h.removeprefix("unix:") if h.endswith(".sock") else h for h in found)
    return tuple(dict.fromkeys(plain))


def listed(text: str | None) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def check_certificate(key: str | None, certificate: str | None) -> None:
    """ValueError for files that https cannot use."""
    if not (key and certificate):
        return
    import ssl

    for path in (key, certificate):
        if not Path(path).is_file():
            raise FileNotFoundError(ENOENT, "there is no such file", path)
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or error.strerror
        raise ValueError(
            f"--ssl-key-file {key} and --ssl-cert-file {certificate}: {reason}"
        ) from None


def api_keys(options: argparse.Namespace) -> tuple[str, ...]:
    """The keys of the options, and of a file of them; ValueError for one of them without any."""
    keys = [key.strip() for key in (options.api_key or "").split(",")]
    if options.api_key is not None and not any(keys):  # as of an unset variable of a shell
        raise ValueError("--api-key is empty: give a key, or leave the option away to need none")
    if options.api_key_file:
        data = Path(options.api_key_file).read_bytes()
        data = data.removeprefix(BOM_UTF8)  # of an editor on Windows
        lines = prompts.decode(data, options.api_key_file).splitlines()
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise ValueError(f"{options.api_key_file} has no keys: put one in each line")
        keys += found
    return tuple(key for key in keys if key)


def template_variables(options: argparse.Namespace) -> dict[str, Any]:
    """What options say to the chat template; ValueError if --chat-template-kwargs is no object."""
    variables: dict[str, Any] = {"enable_thinking": True} if options.reasoning == "on" else {}
    if options.reasoning_effort != "default":
        variables["reasoning_effort"] = options.reasoning_effort
    text = options.chat_template_kwargs
    if not text:
        return variables
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--chat-template-kwargs is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("--chat-template-kwargs must be a JSON object")
    return variables | found


# The model


def load(path: Path, options: argparse.Namespace) -> Model:
    """The model on its device. A context that was not asked for shrinks until it fits."""
    from .. import arch
    from ..backends import choose
    from ..gguf import File
    from ..serve.answers.warmup import warm_up

    started = time.perf_counter()
    kinds = options.batch_invariant, options.activations, options.gemm
    ops = choose(options.device, options.threads, note, *kinds)
    say(f"device: {ops.name} ({ops.reason})")
    kind = "gpu" if ops.asynchronous else "cpu"
    file = File(path)
    if ops.asynchronous:
        compile_kernels(file, ops, options)
    n_positions = options.ctx_size or default_positions(arch.context_length(file), kind)
    while True:
        try:
            loaded = load_with(file, ops, options, n_positions)
            break
        except MemoryError:
            if options.ctx_size or n_positions // 2 < LEAST_CTX:
                raise
            n_positions //= 2
            file = File(path)  # a failed load closes it
    say(f"model: {path.name}, {loaded.file.nbytes / 1e6:.0f} MB in {since(started)}")
    if loaded.n_ctx_train and loaded.n_ctx > loaded.n_ctx_train:
        note(
            f"an answer may have {loaded.n_ctx} tokens, but the model knows {loaded.n_ctx_train}: "
            f"--ctx-seq {loaded.n_ctx_train} limits it"
        )
    for warning in loaded.tokenizer.warnings:
        note(escaped(warning))
    if ops.asynchronous and options.warmup:
        started = time.perf_counter()
        warm_up(loaded.engine)
        say(f"warm-up: {since(started)}")
    return loaded


def load_with(file: File, ops: Any, options: argparse.Namespace, n_positions: int) -> Model:
    """The model, with a bar while that takes time; MemoryError for too many positions."""
    from .. import model

    kind = "gpu" if ops.asynchronous else "cpu"
    with Bar(f"loading {file.path.name}", file.nbytes / 1e6, "MB") as bar:
        return model.load(
            file,
            ops,
            n_ctx=min(options.ctx_seq or n_positions, n_positions),
            n_batch=options.batch_size,
            n_seq=options.parallel or N_PARALLEL[kind],
            n_positions=n_positions,
            prefill_tokens=options.prefill_tokens or PREFILL_TOKENS[kind],
            prefix_cache=options.cache_prompt,
            cache_type_k=options.cache_type_k,
            cache_type_v=options.cache_type_v,
            n_cpu_moe=run_options.n_cpu_moe(options),
            progress=lambda done, total: bar.update(done / 1e6),
            note=note,
        )


def compile_kernels(file: File, ops: Any, options: argparse.Namespace) -> None:
    """Compile all kernels now, in several processes, so that no request waits for one."""
    from ..bench.planned import compile_steps
    from ..cache_types import CacheTypes

    types = CacheTypes(options.cache_type_k, options.cache_type_v)
    n_seq = options.parallel or N_PARALLEL["gpu"]
    policy = {
        "batch_invariant": options.batch_invariant,
        "activations": options.activations,
        "gemm": options.gemm,
    }
    compile_steps(file, ops.device, n_seq, types, note, **policy)


def default_positions(n_ctx_train: int, kind: str) -> int:
    """Positions of the KV cache where --ctx-size says nothing."""
    n = n_ctx_train or LEAST_CTX
    return min(n, N_CTX_CPU) if kind == "cpu" else n
