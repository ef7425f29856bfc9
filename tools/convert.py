"""`ggpy convert CHECKPOINT [OUT.gguf]`: convert a Hugging Face checkpoint to a GGUF file.

    ggpy convert ~/models/Llama-3.2-1B llama.gguf --type q4_k_m
    ggpy convert USER/REPO --type q8_0

CHECKPOINT is a folder with config.json, *.safetensors and a tokenizer, or a repository of the hub.
The program executes no code from it. OUT gets its name only when the whole file is written; before
that it is OUT.xxxxxxxx.part, which is removed when the program fails. A line on stderr for each
tensor gives its type, the root mean square error of a part of its weights, and the time left.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ggpy.cli.parser import Parser, positive
from ggpy.util.messages import escaped
from ggpy.util.outcome import ended

if TYPE_CHECKING:
    from ggpy.convert import ConversionPlan, Folder, ModelConversion
    from ggpy.convert.write import TensorChoice

MB = 1e6
SHARE = 0.01  # of all weights, after which it is known how long the rest takes
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def main(argv: list[str] | None = None) -> int:
    """Run the program; its exit status: 0, 2 for what cannot be done, 130 when interrupted."""
    options = parser().parse_args(argv)
    return ended(lambda: named(options), left=": nothing was written", program="ggpy convert")


def named(options: argparse.Namespace) -> int:
    """`run`; errors of the system that name no file name the one that was to be written."""
    try:
        return run(options)
    except OSError as error:
        if error.strerror and not error.filename:
            error.filename = options.out or options.checkpoint
        raise


def say(message: str) -> None:
    print(f"ggpy convert: {message}", file=sys.stderr, flush=True)


def parser() -> Parser:
    found = Parser("convert", "Convert a Hugging Face checkpoint to a GGUF file.")
    add = found.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="a folder, or USER/REPO of the Hugging Face hub")
    add("out", nargs="?", metavar="OUT",
        help="the file to write, or a folder, which gets NAME-TYPE.gguf (.)")  # fmt: skip
    add("--outfile", metavar="OUT", help="the same as OUT")
    add(
        *("--type", "--outtype"), default="auto", metavar="TYPE",
        help="f32, f16, q8_0, q4_k_m, w8a16 or another type that `ggpy quantize --help` lists "
        "(auto: the types of the checkpoint)",
    )  # fmt: skip
    add(
        *("--tensor-type",), action="append", default=[], metavar="REGEX=TYPE",
        help="the type of tensors whose name matches REGEX; may be repeated",
    )  # fmt: skip
    add("--output-tensor-type", metavar="TYPE", help="the type of output.weight")
    add("--token-embedding-type", metavar="TYPE", help="the type of the embedding table")
    add("--leave-output-tensor", action="store_true", help="do not quantise output.weight")
    add("--pure", action="store_true", help="one type for all matrices instead of a mix")
    add(
        *("--split-max-size",), type=size, default=0, metavar="N(M|G)",
        help="write several files of at most N bytes: OUT-00001-of-0000N.gguf",
    )  # fmt: skip
    add(
        *("--smoothquant",), type=float, metavar="ALPHA",
        help="write w8a8 with SmoothQuant: ALPHA of 0 to 1 is the share of the activations' "
        "outliers that moves into the weights (0.5 is usual)",
    )  # fmt: skip
    add("--calibration", metavar="FILE", help="text that --smoothquant measures activations on")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    add("--name", "--model-name", metavar="TEXT", help="value of general.name in the file")
    add("-t", "--threads", type=positive, metavar="N", help="CPU cores to use (all)")
    add("--dry-run", action="store_true", help="print what would be written, and write nothing")
    add(
        *("--ignore-setting",), action="append", default=[], metavar="NAME",
        help="convert although this setting of config.json is unknown; may be repeated",
    )  # fmt: skip
    add(
        *("--reranker",), action=argparse.BooleanOptionalAction, default=None,
        help="write a reranker that answers yes or no, as Qwen3-Reranker, or do not "
        "(as the checkpoint's name or model card says)",
    )  # fmt: skip
    return found


def size(text: str) -> int:
    """Bytes of "500M", "2G"; argparse's error for anything else."""
    match = re.fullmatch(r"(\d{1,9})([KMG]?)", text.upper())
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: say 500M or 2G")
    return int(match[1]) * UNITS[match[2]]


def run(options: argparse.Namespace) -> int:
    if options.outfile is not None:
        if options.out is not None:
            raise ValueError("the file is named twice: as OUT and with --outfile")
        options.out = options.outfile
    from ggpy.convert import Checkpoint, Folder, mix_of, plan, read_config, read_model
    from ggpy.quantization.mix import tensor_type

    options.tensor_types = [tensor_type(text) for text in options.tensor_type]
    check_types(options)
    check_smoothing(options)
    folder = Folder(resolve(options.checkpoint))
    config, architecture, kind = read_config(folder)
    with Checkpoint(folder, config.get("quantization_config")) as checkpoint:
        model = read_model(
            *(folder, config, architecture, kind, checkpoint),
            name=options.name,
            ignored=options.ignore_setting,
            reranker=options.reranker,
        )
        for warning in model.warnings:
            say(f"warning: {escaped(warning)}")
        if options.smoothquant is not None:
            return smooth(options, model, folder)
        keep = options.type == "auto"
        mix = mix_of(model, model.stored if keep else options.type, **mixed(options))
        type = model.kept_as if keep and model.kept_as else mix.name
        if model.is_quantised and not keep:
            say(f"warning: the checkpoint's {model.kept_as} weights are rounded again; without"
                " --type they stay as they are")  # fmt: skip
        out = target(options, folder.name, type)
        found = plan(model, mix, out, options.split_max_size, keep=keep)
        refuse_inputs(found, [folder.path / name for name in folder.names()])
        announce(model, found, type)
        if mix.n_fallback:
            say(f"{mix.n_fallback} tensors get another type than {type} gives them, because their "
                "rows are not a multiple of its blocks")  # fmt: skip
        if not options.dry_run:
            convert(found, options)
    return 0


def resolve(name: str) -> Path:
    """The folder that is meant; a repository is fetched."""
    from ggpy import hub

    if Path(name).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name[0] == ".":
        return Path(name)
    return hub.fetch_checkpoint(name)


# Types


def check_types(options: argparse.Namespace) -> None:
    """ValueError for names that are not known, before anything is opened."""
    from ggpy.quantization.mix import find_mix

    if options.type != "auto":
        find_mix(options.type)
    mixed(options)


def mixed(options: argparse.Namespace) -> dict[str, Any]:
    """What was said, as `Mix` calls it."""
    from ggpy.quantization.mix import find_type

    output, table = options.output_tensor_type, options.token_embedding_type
    return {
        "pure": options.pure,
        "leave_output": options.leave_output_tensor,
        "output_type": find_type(output) if output else None,
        "token_embd_type": find_type(table) if table else None,
        "tensor_types": options.tensor_types,
    }


def target(options: argparse.Namespace, name: str, type: str) -> Path:
    """Where the file goes."""
    path = Path(options.out or ".")
    is_folder = path.is_dir() or (options.out or "").endswith("/")
    return path / f"{name}-{type}.gguf" if is_folder else path


def refuse_inputs(plan: ConversionPlan, inputs: Sequence[Path]) -> None:
    """ValueError if the checkpoint itself would be overwritten."""
    from ggpy.gguf import GGUFError

    for part in plan.parts:
        if not part.path.parent.is_dir():
            raise GGUFError(f"{part.path}: there is no folder {part.path.parent}: make it first")
        there = part.path.exists() and part.path.suffix != ".gguf"
        if there and any(part.path.samefile(path) for path in inputs):
            raise GGUFError(f"{part.path}: is a part of the checkpoint: name another file")


# Work


def check_smoothing(options: argparse.Namespace) -> None:
    """ValueError for options that do not go together, before anything is opened."""
    from ggpy.quantization.mix import find_mix

    if (options.smoothquant is None) != (options.calibration is None):
        raise ValueError("--smoothquant ALPHA and --calibration FILE belong together")
    if options.smoothquant is None:
        return
    if options.type == "auto":
        options.type = "W8A8"
    if find_mix(options.type) != "W8A8":
        raise ValueError(f"--smoothquant makes w8a8, not {options.type}")
    if options.split_max_size or options.dry_run:
        raise ValueError("--smoothquant goes neither with --split-max-size nor with --dry-run")
    if not 0 <= options.smoothquant <= 1:
        raise ValueError(f"--smoothquant {options.smoothquant:g}: give 0 to 1")


def smooth(options: argparse.Namespace, model: ModelConversion, folder: Folder) -> int:
    """The model as it is stored, to see its activations; and of that the smoothed one."""
    from ggpy.convert import mix_of, plan
    from ggpy.gguf import File
    from ggpy.quantization import requantize
    from ggpy.quantization.smoothquant import calibrate, factors
    from ggpy.quantization.workers import Workers

    text = Path(options.calibration).read_text(encoding="utf-8", errors="replace")
    out = target(options, folder.name, options.type)
    inputs = [folder.path / name for name in folder.names()]
    refuse_inputs(plan(model, mix_of(model, model.stored), out), inputs)
    # The whole model beside OUT, in a folder that is made anew: it goes with all that is in it.
    with TemporaryDirectory(prefix=f"{out.name[:100]}.", suffix=".whole", dir=out.parent) as at:
        path = Path(at, "whole.gguf")
        whole = plan(model, mix_of(model, model.stored), path)
        announce(model, whole, model.stored)
        convert(whole, options)
        with File(path) as file:
            largest = calibrate(file, text, ops_of(options), said)
            mix = requantize.mix_for(file, options.type, **mixed(options))
            moved = factors(file, largest, options.smoothquant)
            made = requantize.plan(file, mix, factors=moved)
            alpha = "quantize.smoothquant.alpha", "f32", options.smoothquant
            requantize.override(made.metadata, *alpha)
            with Workers(options.threads) as workers:
                for _ in requantize.write(made, out, workers):
                    pass
    say(f"{len(moved.columns)} tensors smoothed, {made.nbytes / MB:.1f} MB in {mix.name}, to {out}")
    return 0


def ops_of(options: argparse.Namespace) -> Any:
    from ggpy.backends import choose

    return choose(options.device, options.threads, say)


def said(n: int, total: int) -> None:
    if n == total:
        say(f"calibrated with {total} chunks of text")


def announce(model: ModelConversion, plan: ConversionPlan, type: str) -> None:
    choices = plan.choices
    weights = sum(prod(choice.source.shape) for choice in choices)
    nbytes = sum(choice.slot.nbytes for choice in choices)
    files = ", ".join(str(part.path) for part in plan.parts[:4]) + (", ..." * (len(plan.parts) > 4))
    say(
        f"{model.architecture}, {len(choices)} tensors, {weights / 1e6:.1f} million weights in"
        f" {type}: {nbytes / MB:.1f} MB, {8 * nbytes / max(weights, 1):.2f} bits a weight,"
        f" to {files}"
    )


def convert(plan: ConversionPlan, options: argparse.Namespace) -> None:
    from ggpy.convert import write
    from ggpy.quantization.device_workers import open_workers
    from ggpy.util.progress import Bar

    choices = plan.choices
    weights = [prod(choice.source.shape) for choice in choices]
    start, done, index, error = time.monotonic(), 0, 0, None
    targets = [c.format for c in choices if c.format is not c.source.format]
    with (
        open_workers(options.device, options.threads, say, targets) as workers,
        Bar("converting", sum(weights) / 1e6, "million") as bar,
    ):
        for step in write(plan, workers):
            if step.index != index:
                index, error = step.index, None
            error = step.error if step.error is not None else error
            columns = choices[index].source.shape[-1]
            at = done + step.rows * columns
            if step.rows * columns == weights[index]:
                done += weights[index]
                bar.close()
                left = (time.monotonic() - start) * (sum(weights) / done - 1)
                known = done >= SHARE * sum(weights)
                line = tensor_line(choices, index, error, left if known else None)
                print(line, file=sys.stderr, flush=True)
            bar.update(at / 1e6)
    seconds = time.monotonic() - start
    say(f"done in {seconds:.1f} s, {sum(weights) / 1e6 / max(seconds, 1e-9):.1f} million weights/s")


def tensor_line(
    choices: Sequence[TensorChoice], index: int, error: float | None, left: float | None
) -> str:
    """Number, name, shape, types, error, size, and the time that is left."""
    source, format = choices[index].source, choices[index].format
    shape = " x ".join(map(str, source.shape))
    was = source.format.name if source.format is not format else ""
    kinds = f"{was} -> {format.name}" if was else format.name
    said = "" if error is None else f"rmse {error:.3g}"
    number = f"[{index + 1:4}/{len(choices):4}]"
    text = f"{number} {source.name:34} {shape:>15} {kinds:>14} {said:>14}"
    text += f" {choices[index].slot.nbytes / MB:9.3f} MB"
    return text if left is None else f"{text}, {left:.0f} s left"


if __name__ == "__main__":
    sys.exit(main())
