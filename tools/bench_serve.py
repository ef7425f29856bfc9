"""`ggpy bench_serve --url URL`: measure speeds, waiting times and errors of a server under load.

    ggpy bench_serve --requests 200 --concurrency 64 --input-len 512 --output-len 256 --ignore-eos
    ggpy bench_serve --url http://127.0.0.1:8000 --rate 5 --input-len 128-2048 --plot load.png
    ggpy bench_serve --requests 10000 --concurrency 64 --abort 0.3 --random-params

The server is any with OpenAI's API and streaming. Ctrl-C ends a test, and what was measured until
then is printed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggpy.cli.benchmarks.bench_serve_options import key_of, parser, schema_of, without_key
from ggpy.util.outcome import ended

if TYPE_CHECKING:
    from ggpy.bench.serving.runs import LoadTest
    from ggpy.bench.serving.summary import Document


def main(argv: list[str] | None = None) -> int:
    """Run the program; its exit status: 0, 1 if a request failed, 2 for bad usage, 130 interrupted.

    What the server must say before the test (its models) and does not say is status 1 or 2, too.
    """
    words = sys.argv[1:] if argv is None else argv
    options = parser().parse_args(words)
    command = "ggpy bench_serve " + shlex.join(without_key(words))
    return ended(lambda: measure(options, command), program="ggpy bench_serve")


def measure(options: argparse.Namespace, command: str) -> int:
    """Run the test, and print and write its figures. ValueError, OSError, RuntimeError."""
    from ggpy.bench.machine import now
    from ggpy.bench.serving import runs, summary, table
    from ggpy.util.output_file import write_whole
    from ggpy.util.progress import Bar

    check_outputs(options)
    test = load_test(options)
    head = {"command": command, "time": now(), **settings(options, test)}
    with Bar("load", test.n, "requests") as bar:
        run, about = runs.run(replace(test, step=bar.update))
    found = summary.summary(run, {**head, **about}, detailed=bool(options.json))
    for line in table.lines(found):
        print(line)
    if options.json:
        write_whole(options.json, json.dumps(found, ensure_ascii=False) + "\n")
    if options.plot and run.records:
        from ggpy.bench.serving import plot

        plot.draw(run, found, options.plot)
    if run.signal:
        say("interrupted: the figures are of what was measured until then")
        return 128 + run.signal
    return 1 if run.is_failed else 0


def check_outputs(options: argparse.Namespace) -> None:
    """ValueError or OSError for what could not be written, before anything is measured."""
    if options.texts and not options.json:
        raise ValueError("--texts are written to --json OUT: name a file")
    if options.json and not Path(options.json).absolute().parent.is_dir():
        raise ValueError(f"--json {options.json}: there is no such folder")
    if options.plot:
        from ggpy.bench import plot

        plot.require(options.plot)


def load_test(options: argparse.Namespace) -> LoadTest:
    """The test that the options ask for; ValueError, OSError."""
    from ggpy.bench.serving.client import LoadPlan
    from ggpy.bench.serving.http1 import target_of
    from ggpy.bench.serving.lengths import TokenRange, read_prompts
    from ggpy.bench.serving.requests import PATHS, RequestOptions
    from ggpy.bench.serving.runs import LoadTest

    of_file = not isinstance(options.input_len, TokenRange)
    if of_file and options.shared_prefix:
        raise ValueError("--shared-prefix is for prompts of --input-len N, not for those of a file")
    asked = RequestOptions(
        model=options.model or "",
        api=options.endpoint,
        input_len=TokenRange(1, 1) if of_file else options.input_len,
        output_len=options.output_len,
        prompts=read_prompts(options.input_len) if of_file else (),
        n_shared=options.shared_prefix,
        seed=options.seed,
        temperature=options.temperature,
        ignores_eos=options.ignore_eos,
        schema=schema_of(options),
        abort_share=options.abort,
        has_random_params=options.random_params,
        extra=options.extra,
    )
    plan = LoadPlan(
        path=PATHS[options.endpoint],
        concurrency=options.concurrency,
        rate=options.rate,
        timeout=options.timeout,
        fails_fast=options.fail_fast,
        seed=options.seed,
        keeps_texts=options.texts,
    )
    target = target_of(options.url, key_of(options))
    return LoadTest(target, plan, asked, options.requests, options.warmup, say)


def settings(options: argparse.Namespace, test: LoadTest) -> Document:
    """What the document says about the test."""
    found: dict[str, Any] = {"label": options.label, "url": options.url}
    found |= {"endpoint": test.plan.path, "rate": test.plan.rate}
    found["concurrency"] = test.plan.concurrency
    names = ("requests", "warmup", "shared_prefix", "ignore_eos", "seed", "temperature", "abort")
    found |= {name: getattr(options, name) for name in (*names, "random_params", "extra")}
    found |= {"input_len": str(options.input_len), "output_len": str(options.output_len)}
    return found


def say(message: str) -> None:
    print(f"ggpy bench_serve: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
