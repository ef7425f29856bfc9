"""Compiles a CUDA source with g++ into a library that the emulator's host program runs.

`__shared__` declarations are rewritten into calls that give each CTA its own, guarded copy;
the headers here implement everything else of the language. Libraries stay in the user's cache
folder, named by a digest of all inputs.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ggpy.device import toolkit
from ggpy.device.cache import write_atomically
from ggpy.device.compile import included_files, read_source
from ggpy.util.paths import cache_dir

HERE = Path(__file__).resolve().parent
COMMON = ["-std=c++17", "-g1", "-DGGPY_EMULATOR", "-w", "-ffp-contract=off", "-fno-strict-aliasing"]
# Uninitialised automatic variables of a kernel hold a fixed pattern, so errors are reproducible.
COMMON += ["-ftrivial-auto-var-init=pattern"]
COMMON += ["-Og"]  # kernels run for seconds but compile for minutes: -O1 compiles half as fast
COMMON += ["--param=ggc-min-heapsize=500000"]  # garbage collection takes 6 % of the time
SANITIZE = ["-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# Since C++20, left shifts of negative numbers and into the sign bit are defined.
SANITIZE += ["-fno-sanitize=shift-base"]
KEPT_BYTES = 512 << 20  # maximum size of the cache folder


class EmulatorUnavailable(RuntimeError):
    """The emulator cannot be built on this machine; the message says why."""


class BuildError(RuntimeError):
    """g++ failed to compile a source; the message is its log."""


def compiler() -> str:
    """The path of g++. Raises EmulatorUnavailable if there is none."""
    path = shutil.which(os.environ.get("CXX", "g++"))
    if path is None:
        raise EmulatorUnavailable("no C++ compiler (g++) is installed")
    return path


@functools.cache
def unavailable(sanitize: bool = False) -> str:
    """The reason why the emulator is unavailable on this machine, or ""."""
    try:
        toolkit.header_folders()
        flags = _flags(sanitize)
        with tempfile.TemporaryDirectory() as work:
            (Path(work) / "empty.cpp").write_text("int main() { return 0; }")
            command = [compiler(), *flags, f"{work}/empty.cpp", "-o", f"{work}/empty"]
            done = subprocess.run(command, capture_output=True, text=True)
            built = done.returncode == 0 and subprocess.run([f"{work}/empty"]).returncode == 0
    except (EmulatorUnavailable, toolkit.NvrtcMissing) as error:
        return str(error)
    return "" if built else f"{compiler()} lacks {' '.join(flags)}: {done.stderr.strip()[-300:]}"


def host_program(sanitize: bool) -> Path:
    """Build the program that runs kernels. Returns its path."""
    files = [HERE / "runtime.h", *sorted((HERE / "host").iterdir())]
    sources = {path.name: path.read_bytes() for path in files if path.is_file()}
    # compiled once, but switches between threads all the time: -O2 saves an eighth of a run
    flags = [*_flags(sanitize), "-O2", "-rdynamic"]
    return _build("host", sources, flags, [str(HERE / "host" / "host.cpp"), "-ldl"])


def kernel_library(
    folder: Path,
    name: str,
    expressions: Sequence[str],
    defines: Mapping[str, str | int],
    extra_source: str,
    sanitize: bool,
    headers: Mapping[str, str] | None = None,
) -> Path:
    """Build a shared library of the kernels of `folder/name`. Returns its path.

    Symbol `entry_<i>` is the kernel of expressions[i].
    """
    source = read_source(folder, name, extra_source)
    made = {path: text.encode() for path, text in (headers or {}).items()}
    files = {name: source, **included_files(folder, name, source, made)}
    files = {
        path: rewrite(text.decode(), f"{folder.name}/{path}").encode()
        for path, text in files.items()
    }
    files["emulated_entries.cpp"] = _entries(name, expressions, defines)
    headers_here = {path.name: path.read_bytes() for path in HERE.glob("*.h")}
    inputs = {**files, **{f"emulator/{path}": text for path, text in headers_here.items()}}
    # -Bsymbolic: a kernel may have the name of a C library function. -fno-gnu-unique: each library
    # has its own static variables of templates, because their size may depend on a macro.
    code = [*_flags(sanitize), "-fPIC", "-fno-gnu-unique"]
    flags = [*code, "-shared", "-Wl,-Bsymbolic"]
    first = ["-include", str(_precompiled(headers_here, code))]
    with tempfile.TemporaryDirectory() as work:
        for path, text in files.items():
            (Path(work) / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(work) / path).write_bytes(text)
        sources = [f"-I{work}", f"{work}/emulated_entries.cpp"]
        return _build("kernel", inputs, flags, [*first, *sources])


def _precompiled(inputs: dict[str, bytes], flags: list[str]) -> Path:
    """Precompile emulator.h, which code with these flags includes first.

    Parsing emulator.h is most of the compile time of a small library. It comes before the macros of
    a kernel, so all kernels can use the same precompiled header.
    """
    arguments = ["-x", "c++-header", str(HERE / "emulator.h")]
    header = _build("headers", inputs, flags, arguments, ".h.gch").with_suffix("")
    if not header.exists():  # g++ reads this file if it cannot use the precompiled header
        write_atomically(header, b'#include "emulator.h"\n')
    return header


def _entries(name: str, expressions: Sequence[str], defines: Mapping[str, str | int]) -> bytes:
    """The source of a library, which follows emulator.h."""
    lines = [f"#define {macro} {value}" for macro, value in defines.items()]
    lines.append(f'#include "{name}"')
    for index, expression in enumerate(expressions):
        if expression.isidentifier():  # NVRTC finds a kernel by a plain name only if extern "C"
            lines.append(f'extern "C" decltype({expression}) {expression};')
        lines.append(f'extern "C" const emulator::Entry entry_{index};')
        lines.append(
            f"const emulator::Entry entry_{index} = emulator::EntryOf<&{expression}>::entry;"
        )
    return "\n".join(lines).encode()


def _flags(sanitize: bool) -> list[str]:
    return [*COMMON, *SANITIZE] if sanitize else COMMON


@functools.cache
def _compiler_version() -> str:
    return subprocess.run(
        [compiler(), "--version"], capture_output=True, text=True, check=True
    ).stdout


def _build(
    kind: str,
    inputs: dict[str, bytes],
    flags: list[str],
    arguments: list[str],
    suffix: str = "",
) -> Path:
    """Compile, unless the cache holds the result of the same inputs."""
    digests = {name: hashlib.sha256(text).hexdigest() for name, text in sorted(inputs.items())}
    parts = [digests, flags, _compiler_version(), toolkit.headers_version()]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    target = cache_dir("emulator") / f"{kind}-{digest}{suffix}"
    with _locked(target):
        if target.exists():
            target.touch()
            return target
        includes = [f"-I{HERE}", *(f"-I{path}" for path in toolkit.header_folders())]
        with tempfile.TemporaryDirectory() as work:
            output = Path(work) / "output"
            command = [compiler(), *flags, *includes, *arguments, "-o", str(output)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise BuildError(f"{' '.join(command)}\n{done.stderr}")
            write_atomically(target, output.read_bytes())
        target.chmod(0o755)
    _trim(target.parent)
    return target


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold a lock on `target`, so that parallel test processes do not compile the same source."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{target}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file unlocks it


def _trim(folder: Path) -> None:
    """Delete the least recently used files. Another process may do so at the same time."""
    files = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    total = 0
    for _, size, path in sorted(files, reverse=True):
        total += size
        if total > KEPT_BYTES:
            path.unlink(missing_ok=True)


_SKIPPED = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
_SHARED = re.compile(
    rf"(?P<skip>{_SKIPPED})|(?P<extern>extern\s+)?\b__shared__\b(?P<declaration>[^;]*);", re.DOTALL
)
_ALIGNMENT = re.compile(r"\b(?:alignas|__align__)\s*\(([^()]*(?:\([^()]*\))?[^()]*)\)")
_DECLARATOR = re.compile(r"^(?P<name>\w+)\s*(?P<extents>(?:\[.*\])?)$", re.DOTALL)


def rewrite(source: str, path: str) -> str:
    """Rewrite `__shared__` variables as references to the CTA's memory. Keeps line numbers."""

    def replace(match: re.Match) -> str:
        if match["skip"] is not None:
            return match[0]
        line = source.count("\n", 0, match.start()) + 1
        if match["extern"]:
            if "SHARED_DYNAMIC" in source:
                return match[0]  # the definition of the macro for the GPU
            raise BuildError(
                f"{path}:{line}: write SHARED_DYNAMIC(type, name) instead of extern __shared__"
            )
        return _shared_variables(match["declaration"], f"{path}:{line}") + "\n" * match[0].count(
            "\n"
        )

    return f'#line 1 "{path}"\n' + _SHARED.sub(replace, source)


def _shared_variables(declaration: str, place: str) -> str:
    alignment = _ALIGNMENT.search(declaration)
    parts = _split(_ALIGNMENT.sub(" ", declaration).strip())
    head = re.match(r"^(?P<type>.*[\s>*&])(?P<first>\w+\s*(?:\[.*\])?)$", parts[0], re.DOTALL)
    if head is None:
        raise BuildError(f"{place}: cannot read the declaration `__shared__ {declaration.strip()}`")
    text = ""
    for declarator in (head["first"], *parts[1:]):
        match = _DECLARATOR.match(declarator.strip())
        if match is None:
            raise BuildError(
                f"{place}: cannot read `{declarator.strip()}` in a __shared__ declaration"
            )
        text += _shared_variable(head["type"].strip(), match["name"], match["extents"], alignment)
    return text.replace("\n", " ")


def _shared_variable(type_name: str, name: str, extents: str, alignment: re.Match | None) -> str:
    kind, slot = f"emulated_type_{name}", f"emulated_slot_{name}"
    align = alignment[1] if alignment else f"alignof({kind})"
    return (
        f"using {kind} = {type_name} {extents}; static constexpr ::emulator::SharedSlot {slot}"
        f'{{sizeof({kind}), {align}, "{name}", __FILE__, __LINE__}}; '
        f"{kind}& {name} = *static_cast<{kind}*>(::emulator::shared({slot})); "
    )


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "<([{") - (char in ">)]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]
