"""The files of the page as HTTP answers, and that a wheel has them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ggpy.serve.static import CONTENT_SECURITY_POLICY, OWN_PAGE, WebPage, page_files

ROOT = Path(__file__).resolve().parents[2]


def folder(tmp_path: Path, **files: str) -> Path:
    """A user's page: names with "__" for "/" and "_" for "."."""
    for name, text in files.items():
        path = tmp_path / "ui" / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "ui"


def test_the_page_is_at_the_root() -> None:
    answer = WebPage().answer("/")
    assert answer is not None and answer.status == 200
    assert answer.body == (OWN_PAGE / "index.html").read_bytes()
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert answer.headers["Content-Security-Policy"] == CONTENT_SECURITY_POLICY
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize(
    ("name", "media_type"),
    [("page.css", "text/css"), ("main.js", "text/javascript"), ("icon.svg", "image/svg+xml")],
)
def test_files_have_the_media_type_that_a_browser_demands(name: str, media_type: str) -> None:
    answer = WebPage().answer(f"/{name}")
    assert answer is not None and answer.headers["Content-Type"].startswith(media_type)


def test_a_file_that_the_browser_has_is_not_sent_again() -> None:
    page = WebPage()
    first = page.answer("/main.js")
    assert first is not None
    for known in (first.headers["ETag"], f'"x", W/{first.headers["ETag"]}', "*"):
        again = page.answer("/main.js", known)
        assert again is not None and (again.status, again.body) == (304, b"")
    other = page.answer("/main.js", '"x"')
    assert other is not None and other.status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../render.py",
        "/..",
        "//etc/passwd",
        "/page.css/",
        "/./page.css",
        "/%2e%2e/x",
        "/\0",
        "/no",
    ],
)
def test_other_paths_have_no_answer(path: str) -> None:
    assert WebPage().answer(path) is None


def test_a_users_folder_is_another_page(tmp_path: Path) -> None:
    page = WebPage(folder(tmp_path, index_html="mine", js__app_mjs="x", sub__index_html="sub"))
    for path, body in (("/", b"mine"), ("/js/app.mjs", b"x"), ("/sub/", b"sub")):
        answer = page.answer(path)
        assert answer is not None and answer.body == body
    assert page.answer("/page.css") is None
    answer = page.answer("/")
    assert answer is not None
    assert "default-src" not in answer.headers["Content-Security-Policy"], (
        "it may be stricter itself"
    )


def test_nothing_outside_of_the_folder_and_nothing_hidden_is_a_file(tmp_path: Path) -> None:
    root = folder(tmp_path, index_html="x", _secret="s", _git__config="c")
    (tmp_path / "other.txt").write_text("o", encoding="utf-8")
    (root / "out.txt").symlink_to(tmp_path / "other.txt")
    (root / "up").symlink_to(tmp_path)
    (root / "in.txt").symlink_to(root / "index.html")
    assert set(page_files(root)) == {"index.html", "in.txt"}


def test_a_folder_that_is_no_page_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError, match=r"no index\.html"):
        WebPage(tmp_path)
    monkeypatch.setattr("ggpy.serve.static.MAX_FILES", 1)
    with pytest.raises(ValueError, match="more than 1 files"):
        WebPage(folder(tmp_path, index_html="x", a_js="y"))


def test_the_page_names_its_own_files_alone() -> None:
    """Every file that the page loads is there, and none is elsewhere."""
    files = page_files()
    html = files["index.html"].content.decode()
    assert set(re.findall(r'(?:href|src)="(?!#)([^"]+)"', html)) <= set(files)
    for name, file in files.items():
        if name.endswith(".js"):
            imported = re.findall(r'from "\./([^"]+)"', file.content.decode())
            assert set(imported) <= set(files), name
            assert all(f'modulepreload" href="{other}"' in html for other in imported)
    css = files["page.css"].content.decode()
    assert "url(" not in css and "@import" not in css


def test_the_policy_needs_no_exception() -> None:
    """Neither inline scripts nor inline styles."""
    files = page_files()
    html = files["index.html"].content.decode()
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", html)
    scripts = [f.content.decode() for name, f in files.items() if name.endswith(".js")]
    assert not any(re.search(r"\beval\(|new Function|setAttribute\(\"style", s) for s in scripts)


def test_every_class_of_the_highlighter_that_matters_has_a_colour() -> None:
    css = page_files()["page.css"].content.decode()
    for name in ("k", "s1", "s2", "mi", "mf", "nf", "nc", "nb", "c1", "cm"):
        assert re.search(rf"\.code pre :is\([^)]*\.{name}[,)]", css), name


def test_the_wheel_has_the_page() -> None:
    """Hatchling takes all files of a package that git does not ignore."""
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    suffixes = {path.suffix for path in OWN_PAGE.iterdir()}
    assert not [line for line in ignored if line.lstrip("*") in suffixes or "page" in line]


def test_the_recipe_for_nginx_lets_the_page_ask_for_all_that_it_needs() -> None:
    scripts = "".join(path.read_text() for path in OWN_PAGE.glob("*.js"))
    asked = set(re.findall(r'\bsend\("([^"]+)"', scripts))
    assert {"props", "v1/models", "render"} <= asked
    recipe = (ROOT / "docs" / "deploy" / "nginx.conf").read_text()
    closed = re.findall(r"location ~ (\S+) \{\s+allow 127\.0\.0\.1;\s+deny all;", recipe)
    assert closed and not [name for name in asked if re.search(closed[0], f"/{name}")]
