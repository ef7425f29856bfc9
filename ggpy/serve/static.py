"""The files of the page in memory, and the HTTP answers that hand them out.

They are read once, so a request names one of them or nothing: there is no path to escape from.
Nothing here knows the web framework or what the files contain.
"""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

OWN_PAGE = Path(__file__).resolve().parent / "page"
MAX_FILES = 4000  # of a user's page
MAX_BYTES = 256 << 20

SECURITY_HEADERS: Mapping[str, str] = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_MEDIA_TYPES = {  # the system's table may know others, or wrong ones
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".map": "application/json",
    ".mjs": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".wasm": "application/wasm",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}


class WebFile(NamedTuple):
    """A file of the page. etag: with its quotes."""

    content: bytes
    media_type: str
    etag: str


class WebAnswer(NamedTuple):
    """What an HTTP server answers to GET; for HEAD it leaves the body out."""

    status: int
    headers: dict[str, str]
    body: bytes


class WebPage:
    """The page of ggpy, or that of a user's folder.

    folder: its index.html is the page; None is ggpy's own. Raises FileNotFoundError without an
    index.html, ValueError for a folder that is too large to be a page.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.files = page_files(folder)
        # A user's page may have inline scripts, as llama.cpp's has: its policy is its own matter.
        policy = "frame-ancestors 'none'" if folder else CONTENT_SECURITY_POLICY
        self.headers = {**SECURITY_HEADERS, "Content-Security-Policy": policy}

    def answer(self, path: str, if_none_match: str | None = None) -> WebAnswer | None:
        """The answer to GET of a decoded URL path ("/", "/page.css"); None where no file has it."""
        name = path.removeprefix("/")
        file = self.files.get(name + "index.html" if name.endswith("/") or not name else name)
        if file is None:
            return None
        # Asked for again each time, answered with 304 mostly: a new version shows at once.
        headers = {**self.headers, "ETag": file.etag, "Cache-Control": "no-cache"}
        if if_none_match is not None and _matches(file.etag, if_none_match):
            return WebAnswer(304, headers, b"")
        return WebAnswer(200, {**headers, "Content-Type": file.media_type}, file.content)


def _matches(etag: str, if_none_match: str) -> bool:
    given = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return etag in given or "*" in given


def page_files(folder: Path | None = None) -> dict[str, WebFile]:
    """Path inside the folder ("js/main.js") -> file; hidden files, and links out of it, are left
    out.

    Errors as in WebPage.
    """
    root = (folder or OWN_PAGE).resolve()
    if not (root / "index.html").is_file():
        raise FileNotFoundError(
            f"{folder or OWN_PAGE} has no index.html: --ui takes a page's folder"
        )
    files: dict[str, WebFile] = {}
    total = 0
    for path in _visible(root):
        total += path.stat().st_size
        if total > MAX_BYTES or len(files) == MAX_FILES:
            raise ValueError(
                f"{root} has more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB: "
                "--ui takes the folder of a built page"
            )
        files[path.relative_to(root).as_posix()] = _read(path)
    return files


def _visible(root: Path) -> Iterator[Path]:
    for path in root.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        if not hidden and path.is_file() and path.resolve().is_relative_to(root):
            yield path


def _read(path: Path) -> WebFile:
    content = path.read_bytes()
    guessed = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    digest = hashlib.sha256(content).hexdigest()[:20]
    return WebFile(content, _MEDIA_TYPES.get(path.suffix.lower(), guessed), f'"{digest}"')
