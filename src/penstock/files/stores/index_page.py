"""The files in a folder of a web server that shows a page of links, as nginx, Apache and `python -m http.server` do."""

import http.client
import time
import urllib.error
import urllib.request
from html.parser import HTMLParser
from urllib.parse import unquote, urljoin, urlsplit

from penstock.files.stores.counts import TransferCounts
from penstock.files.stores.errors import RequestError
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.retry import repeat, stall_seconds
from penstock.files.stores.url import Url

__all__ = ["list_page"]

_MOST_BYTES, _PIECE_BYTES = 64 << 20, 1 << 16  # of a page: a link for each of some hundred thousand files


def list_page(folder: Url, options: StoreOptions | None = None) -> list[str]:
    """Return the names in a folder, sorted, without those in folders below it; ReadError if there is no such page."""
    options = options or StoreOptions()
    address, page = repeat(
        lambda seconds: _fetch(f"{folder}/", options, seconds), f"Could not list {folder}", options, TransferCounts()
    )
    parser = _Links()
    parser.feed(page)
    return sorted({name for link in parser.links if (name := _find_name(address, link))})


class _Links(HTMLParser):
    """The targets of all links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _find_name(address: str, link: str) -> str:
    """Return the name of what a link leads to; empty if it is not in the folder of the page.

    Examples
    --------
    >>> links = "a%20b.nwb", "/raw/c.nwb", "sub/", "../", "?C=N;O=D", "sub/d.nwb", "https://other.org/raw/e.nwb"
    >>> [_find_name("https://example.org/raw/", link) for link in links]
    ['a b.nwb', 'c.nwb', 'sub', '', '', '', '']
    """
    try:
        page, target = urlsplit(address), urlsplit(urljoin(address, link))
    except ValueError:  # not a URL
        return ""
    folder, path = unquote(page.path), unquote(target.path)
    if (page.scheme, page.netloc) != (target.scheme, target.netloc) or not path.startswith(folder):
        return ""
    name = path.removeprefix(folder).removesuffix("/")
    return "" if "/" in name or name in (".", "..") else name


def _fetch(address: str, options: StoreOptions, seconds: float) -> tuple[str, str]:
    """Return the address of a page, to which the server may have led, and its text."""
    until = time.monotonic() + seconds
    asked = urllib.request.Request(address)  # noqa: S310  # of http or https
    for name, value in (options.credentials or dict)().items():
        asked.add_unredirected_header(str(name), str(value))  # not for another server
    try:
        with urllib.request.urlopen(asked, timeout=min(seconds, stall_seconds(options))) as answer:  # noqa: S310
            if answer.headers.get_content_type() != "text/html":
                raise RequestError("refused", "the answer is no page of links")
            content = bytearray()
            while piece := answer.read1(_PIECE_BYTES):
                content += piece
                if len(content) > _MOST_BYTES or time.monotonic() > until:
                    raise RequestError("refused", "the page of links does not end")
            if answer.headers.get("Content-Length", str(len(content))) != str(len(content)):
                raise RequestError("again", "the body ended early")
            return answer.url, content.decode(answer.headers.get_content_charset("utf-8"), "replace")
    except urllib.error.HTTPError as error:
        error.close()
        may_pass = error.code in (408, 425, 429) or (error.code >= 500 and error.code != 501)
        raise RequestError(
            "again" if may_pass else "refused", f"the server answered {error.code} {error.reason}"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise RequestError("again", f"the connection failed: {error}") from error
    except LookupError as error:
        raise RequestError("refused", f"the page has an unknown encoding: {error}") from error
