"""Times llama.cpp on the CPU as its llama-bench does, through the C interface of the shared library
in the wheel `xllamacpp`, so that nothing must be built.

Tests and rows are llama-bench's: random tokens, a prompt in pieces of n_batch tokens, one sequence.
ggpy's engine is not used. Source of the functions: llama.cpp's include/llama.h.
"""

from __future__ import annotations

import ctypes as c
import importlib.util
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from .workload import Test

MAX_THREADS = 512  # GGML_MAX_N_THREADS
MISSING = "llama.cpp's wheel is not installed: pip install xllamacpp"


class OpaqueParams(c.Structure):
    """Parameters of a model or a context: larger than both structures, and only passed on."""

    _fields_ = (("words", c.c_uint32 * 256),)


class ThreadpoolParams(c.Structure):
    """`ggml_threadpool_params`."""

    _fields_ = (
        ("cpumask", c.c_bool * MAX_THREADS),
        ("n_threads", c.c_int),
        ("prio", c.c_int),
        ("poll", c.c_uint32),
        ("strict_cpu", c.c_bool),
        ("paused", c.c_bool),
    )


class LlamaBatch(c.Structure):
    """`llama_batch`."""

    _fields_ = (
        ("n_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embd", c.POINTER(c.c_float)),
        ("pos", c.POINTER(c.c_int32)),
        ("n_seq_id", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    )


Log = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
_quiet = Log(lambda level, text, user: None)  # a global, because llama.cpp keeps calling it

FUNCTIONS: tuple[tuple[Any, ...], ...] = (  # name, type of the result, types of the arguments
    ("llama_log_set", None, Log, c.c_void_p),
    ("llama_model_default_params", OpaqueParams),
    ("llama_context_default_params", OpaqueParams),
    ("llama_model_load_from_file", c.c_void_p, c.c_char_p, OpaqueParams),
    ("llama_init_from_model", c.c_void_p, c.c_void_p, OpaqueParams),
    ("llama_model_get_vocab", c.c_void_p, c.c_void_p),
    ("llama_vocab_n_tokens", c.c_int32, c.c_void_p),
    ("llama_model_desc", c.c_int32, c.c_void_p, c.c_char_p, c.c_size_t),
    ("llama_model_size", c.c_uint64, c.c_void_p),
    ("llama_model_n_params", c.c_uint64, c.c_void_p),
    ("llama_set_n_threads", None, c.c_void_p, c.c_int32, c.c_int32),
    ("llama_attach_threadpool", None, c.c_void_p, c.c_void_p, c.c_void_p),
    ("llama_get_memory", c.c_void_p, c.c_void_p),
    ("llama_memory_clear", None, c.c_void_p, c.c_bool),
    ("llama_batch_get_one", LlamaBatch, c.POINTER(c.c_int32), c.c_int32),
    ("llama_decode", c.c_int32, c.c_void_p, LlamaBatch),
    ("llama_synchronize", None, c.c_void_p),
    ("llama_free", None, c.c_void_p),
    ("llama_model_free", None, c.c_void_p),
    ("ggml_threadpool_params_default", ThreadpoolParams, c.c_int),
    ("ggml_threadpool_new", c.c_void_p, c.POINTER(ThreadpoolParams)),
    ("ggml_threadpool_free", None, c.c_void_p),
)


def is_installed() -> bool:
    """Whether the wheel is installed."""
    return importlib.util.find_spec("xllamacpp") is not None


def library(more: Sequence[tuple[Any, ...]] = ()) -> c.CDLL:
    """The library llama.cpp without its log, with the types of FUNCTIONS and of `more` set.

    Raises RuntimeError without the wheel.
    """
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise RuntimeError(MISSING)
    found = c.CDLL(str(next(Path(spec.origin).parent.glob("xllamacpp*.so"))))
    for name, result, *arguments in (*FUNCTIONS, *more):
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    found.llama_log_set(_quiet, None)
    return found


class LlamaCpp:
    """A model in llama.cpp with a context for one test.

    path: a GGUF file; n_threads: for prefill and decode. Raises RuntimeError if llama.cpp does not
    load the file.
    """

    def __init__(self, path: Path, test: Test, n_threads: int) -> None:
        self.lib, self._test = library(), test
        self._context = self._threads = None
        self._model = self.lib.llama_model_load_from_file(
            str(path).encode(), self.lib.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"{path}: llama.cpp does not load it")
        params = self.lib.llama_context_default_params()
        params.words[:3] = test.n_ctx, test.n_batch, test.n_ubatch
        self._context = self.lib.llama_init_from_model(self._model, params)
        if not self._context:
            self.close()
            raise RuntimeError(f"{path}: llama.cpp has no memory for {test.n_ctx} tokens")
        self.lib.llama_set_n_threads(self._context, n_threads, n_threads)
        threads = self.lib.ggml_threadpool_params_default(n_threads)
        self._threads = self.lib.ggml_threadpool_new(c.byref(threads))
        self.lib.llama_attach_threadpool(self._context, self._threads, self._threads)
        n_vocab = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self._model))
        rng = np.random.default_rng(0)
        self._ids = rng.integers(n_vocab, size=max(test.n_ctx, 1), dtype=np.int32)

    def close(self) -> None:
        """Frees the context, the threads and the model."""
        if self._context:
            self.lib.llama_free(self._context)
        if self._threads:
            self.lib.ggml_threadpool_free(self._threads)
        self.lib.llama_model_free(self._model)

    def once(self) -> int:
        """Nanoseconds of one repetition of the test; the depth is evaluated before."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self._context), True)
        self._prompt(self._test.n_depth)
        start = time.perf_counter_ns()
        self._prompt(self._test.n_prompt)
        for _ in range(self._test.n_gen):
            self._decode(1)
            self.lib.llama_synchronize(self._context)
        return time.perf_counter_ns() - start

    def facts(self) -> dict[str, Any]:
        """llama-bench's fields that do not depend on the test."""
        name = c.create_string_buffer(128)
        self.lib.llama_model_desc(self._model, name, len(name))
        return {
            "build_commit": f"xllamacpp {version('xllamacpp')}",
            "model_type": name.value.decode(),
            "model_size": self.lib.llama_model_size(self._model),
            "model_n_params": self.lib.llama_model_n_params(self._model),
        }

    def _prompt(self, n: int) -> None:
        for start in range(0, n, self._test.n_batch):
            self._decode(min(self._test.n_batch, n - start))
        self.lib.llama_synchronize(self._context)

    def _decode(self, n: int) -> None:
        ids = self._ids[:n].ctypes.data_as(c.POINTER(c.c_int32))
        if self.lib.llama_decode(self._context, self.lib.llama_batch_get_one(ids, n)):
            raise RuntimeError(f"llama.cpp failed on a step of {n} tokens")


def run(
    path: Path, tests: Sequence[Test], repetitions: int, n_threads: int
) -> Iterator[dict[str, Any]]:
    """A row of llama-bench's JSON for each test; RuntimeError.

    One repetition is not counted: it reads the file and fills the caches.
    """
    for test in tests:
        model = LlamaCpp(path, test, n_threads)
        try:
            model.once()
            times = [model.once() for _ in range(repetitions)]
            yield {**model.facts(), **_row(path, test, n_threads, times)}
        finally:
            model.close()


def _row(path: Path, test: Test, n_threads: int, times: list[int]) -> dict[str, Any]:
    speeds = [(test.n_prompt + test.n_gen) * 1e9 / ns for ns in times]
    return {
        "backends": "CPU",
        "model_filename": str(path),
        "n_threads": n_threads,
        **{name: getattr(test, name) for name in ("n_batch", "n_ubatch", "n_prompt", "n_gen")},
        "n_depth": test.n_depth,
        "avg_ns": int(np.mean(times)),
        "stddev_ns": int(np.std(times)),
        "avg_ts": float(np.mean(speeds)),
        "stddev_ts": float(np.std(speeds)),
        "samples_ns": times,
        "samples_ts": speeds,
    }
