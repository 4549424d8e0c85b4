"""Folders of web servers that show a page of links."""

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from penstock_remote import Endpoint

from penstock import ReadError, SourceError
from penstock.convert.inputs.patterns import expand_paths
from penstock.files.stores.index_page import list_page
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url

NAMES = ["a & b.nwb", "a.nwb", "b%20.nwb", "c.txt", "sub", "ü.nwb"]
PAGE = b"""<html><a href="?C=N;O=D">Name</a><a href="../">Up</a><a href="/raw/x.nwb">x</a><A HREF="y.nwb?v=1">y</A>
<a>none</a><a href="http://[bad">z</a><a href="https://example.org/raw/z.nwb">z</a><a href="deep/z.nwb">z</a>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files, pages of links, and what servers may answer instead."""

    answers: ClassVar[list[int]] = []
    tokens: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.tokens.append(self.headers.get("X-Token"))
        if self.answers[:1] == [200]:
            self.answers.pop()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(PAGE) + 1))
            self.end_headers()
            self.wfile.write(PAGE)
        elif self.answers:
            self.send_error(self.answers.pop(0))
        elif self.path == "/raw/":
            self.send_response(200)
            self.send_header("Content-Type", "text/html")  # without a length, as nginx and Apache
            self.end_headers()
            self.wfile.write(PAGE)
        else:
            super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Url]:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    for name in NAMES:
        if "." in name:
            (tmp_path / name).write_text(name)
        else:
            (tmp_path / name).mkdir()
    monkeypatch.setattr(Handler, "answers", [])
    monkeypatch.setattr(Handler, "tokens", [])
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *given: Handler(*given, directory=str(tmp_path)))
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield Url(f"http://127.0.0.1:{running.server_port}")
    running.shutdown()
    thread.join()
    running.server_close()


def test_the_names_of_a_folder_are_those_of_its_files(server: Url) -> None:
    assert list_page(server) == NAMES
    assert list_page(server / "sub") == []
    assert [place.name for place in expand_paths([f"{server}/*.nwb"])] == [name for name in NAMES if "nwb" in name]


def test_links_to_other_places_are_left_out(server: Url) -> None:
    assert list_page(server / "raw") == ["x.nwb", "y.nwb"]


def test_a_page_is_asked_for_again_with_the_credentials(server: Url) -> None:
    Handler.answers += [503, 200]  # 200: a page that ends early
    assert list_page(server, StoreOptions(credentials=lambda: {"X-Token": "secret"})) == NAMES
    assert Handler.tokens == ["secret"] * 3


def test_a_server_without_such_a_page_says_so(server: Url, http_files: Endpoint) -> None:
    for status in (403, 404):
        Handler.answers += [status]
        with pytest.raises(ReadError, match=f"Could not list {server}/sub: the server answered {status}"):
            list_page(server / "sub")
    (http_files.folder / "a.nwb").write_text("a")
    with pytest.raises(SourceError, match=r"The web server does not list its files, got the pattern .*Name each file"):
        expand_paths([str(http_files.url / "*.nwb")])


def test_a_pattern_of_folders_of_a_web_server_is_refused(server: Url) -> None:
    with pytest.raises(SourceError, match="Only the last part of the address of a web server may be a pattern"):
        expand_paths([f"{server}/s*/*.nwb"])
    with pytest.raises(SourceError, match="No object matches"):
        expand_paths([f"{server}/*.zarr"])
