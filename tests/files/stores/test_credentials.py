"""Endpoint, region and credentials from the environment and from config files, against a server that checks them."""

import http.server
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from penstock_remote import Endpoint, s3_keys

from penstock import MissingDependency, OptionError, ReadError, StoreOptions
from penstock.files.stores.clients.settings import find_provider, obstore_config
from penstock.files.stores.store import open_store
from penstock.files.stores.url import Url

SECRETS = ("penstockkey", "penstocksecret")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment without anything of AWS; returns the home folder."""
    for name in os.environ:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    return tmp_path


def check(s3: Endpoint, options: StoreOptions) -> None:
    """Read an object; the server refuses wrong signatures."""
    (s3.folder / "x").write_bytes(b"1234")
    assert open_store(s3.url, options).read_object("x")[0] == b"1234"


def test_everything_comes_from_the_environment(s3: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    check(s3, StoreOptions(retries=1))


def test_the_endpoint_of_s3_comes_before_that_of_all_services(s3: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**s3.environment, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.address)
    check(s3, StoreOptions(retries=2))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    with pytest.raises(OptionError, match="endpoint must be that of AWS_ENDPOINT_URL_S3 if this variable is set"):
        check(s3, StoreOptions(endpoint=s3.address, retries=2))


@pytest.mark.parametrize("profile", ["default", "lab"])
def test_everything_comes_from_the_files_of_a_profile(
    s3: Endpoint, clean: Path, monkeypatch: pytest.MonkeyPatch, profile: str
) -> None:
    section = profile if profile == "default" else f"profile {profile}"
    (clean / ".aws" / "config").write_text(f"[{section}]\nregion = us-east-1\nendpoint_url = {s3.address}\n")
    (clean / ".aws" / "credentials").write_text(
        f"[{profile}]\naws_access_key_id = penstockkey\naws_secret_access_key = penstocksecret\n"
    )
    if profile != "default":
        monkeypatch.setenv("AWS_PROFILE", profile)
    check(s3, StoreOptions(retries=3 + len(profile)))


def test_files_elsewhere_are_read(s3: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text(
        "[default]\naws_access_key_id=penstockkey\naws_secret_access_key=penstocksecret\naws_session_token=x%y\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    provider = find_provider("s3", StoreOptions())
    assert provider is not None
    assert provider() == {**s3_keys(), "token": "x%y"}


def test_keys_in_the_environment_come_before_a_profile(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (clean / ".aws" / "credentials").write_text("[default]\naws_access_key_id=a\naws_secret_access_key=b\n")
    assert find_provider("s3", StoreOptions()) is not None
    assert find_provider("s3", StoreOptions(anonymous=True)) is None
    assert find_provider("gs", StoreOptions()) is None
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "c")
    assert find_provider("s3", StoreOptions()) is None
    assert find_provider("s3", StoreOptions(credentials=s3_keys)) is s3_keys


def test_a_profile_that_is_not_there_or_needs_more_is_an_error(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "lab")
    with pytest.raises(OptionError, match=r"AWS_PROFILE must name a profile of .*, got 'lab'"):
        open_store(Url("s3://bucket/a"), StoreOptions(retries=20)).describe("x")
    (clean / ".aws" / "config").write_text("[profile lab]\nsso_start_url = https://example.org\n")
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(OptionError, match=r"profile 'lab' gets its keys by a role, by SSO .*pip install boto3"):
        open_store(Url("s3://bucket/a"), StoreOptions(retries=21)).describe("x")


def test_a_file_that_is_no_config_file_is_an_error_without_its_text(clean: Path) -> None:
    (clean / ".aws" / "credentials").write_text("penstocksecret\n")
    with pytest.raises(OptionError, match=r"credentials must be a config file of AWS") as caught:
        open_store(Url("s3://bucket/a"), StoreOptions(retries=22)).describe("x")
    assert "penstocksecret" not in str(caught.value)


def test_without_credentials_the_error_says_what_to_do(s3: Endpoint) -> None:
    with pytest.raises(ReadError, match=r"no credentials were found\. Set AWS_ACCESS_KEY_ID .*anonymous=True"):
        open_store(s3.url, StoreOptions(endpoint=s3.address, retries=4)).describe("x")


def test_credentials_that_are_set_after_an_error_are_found(s3: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(s3.url, StoreOptions(retries=5))
    with pytest.raises(ReadError, match="no credentials were found"):
        store.describe("x")
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    (s3.folder / "x").write_bytes(b"1234")
    assert store.read_object("x")[0] == b"1234"


def test_anonymous_requests_are_not_signed(s3: Endpoint) -> None:
    with pytest.raises(ReadError, match="the server answered 40"):  # this one has no public buckets
        open_store(s3.url, StoreOptions(endpoint=s3.address, anonymous=True)).describe("x")
    assert obstore_config("s3", StoreOptions(anonymous=True), None)["skip_signature"] is True
    assert obstore_config("gs", StoreOptions(anonymous=True), None) == {"skip_signature": True}


def test_credentials_are_renewed_before_they_expire(s3: Endpoint) -> None:
    (s3.folder / "x").write_bytes(b"1234")
    times: list[datetime] = []

    def provide() -> dict[str, Any]:
        seconds = 5 if not times else 3600
        times.append(datetime.now(UTC) + timedelta(seconds=seconds))
        return {**s3_keys(), "expires_at": times[-1]}

    store = open_store(s3.url, StoreOptions(endpoint=s3.address, region="us-east-1", credentials=provide))
    for _ in range(5):
        assert store.read_object("x")[0] == b"1234"
    assert len(times) == 2


def test_http_headers_are_credentials_too(http_files: Endpoint) -> None:
    (http_files.folder / "x").write_bytes(b"1234")
    http_files.break_requests({"kind": "token", "token": "Bearer secret"})
    with pytest.raises(ReadError, match=r"answered 401 .*check the credentials"):
        open_store(http_files.url).read_object("x")
    options = StoreOptions(credentials=lambda: {"Authorization": "Bearer secret"})
    assert open_store(http_files.url, options).read_object("x")[0] == b"1234"


@contextmanager
def serve(sent: list[str], redirect_to: str | None = None) -> Iterator[int]:
    """Serve an object of 4 bytes, or redirect requests elsewhere; note the headers. Yields the port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            sent.append(str(self.headers))
            is_elsewhere = redirect_to is not None and "moved" not in self.path
            self.send_response(307 if is_elsewhere else 206)
            if redirect_to is not None and is_elsewhere:
                self.send_header("Location", redirect_to)
            else:
                self.send_header("Content-Range", "bytes 0-3/4")
                self.send_header("ETag", '"1"')
                self.send_header("Last-Modified", "Tue, 01 Jan 2030 00:00:00 GMT")
            self.send_header("Content-Length", "0" if is_elsewhere else "4")
            self.end_headers()
            self.wfile.write(b"" if is_elsewhere else b"1234")

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


@pytest.mark.parametrize("header", ["Authorization", "Cookie"])
def test_headers_are_not_sent_to_a_server_that_is_redirected_to(header: str) -> None:
    here: list[str] = []
    there: list[str] = []
    with serve(there) as other, serve(here, f"http://127.0.0.1:{other}/x") as port:
        options = StoreOptions(credentials=lambda: {header: "SECRET"}, retries=1)
        assert open_store(Url(f"http://127.0.0.1:{port}"), options).read_range("x", 0, 4) == b"1234"
    assert "SECRET" in here[0]
    assert there
    assert not any("SECRET" in headers for headers in there)


def test_headers_that_a_redirect_would_take_to_another_server_are_refused() -> None:
    options = StoreOptions(credentials=lambda: {"X-Api-Key": "SECRET"})
    with pytest.raises(
        OptionError, match=r"must be the headers Authorization or Cookie, got X-Api-Key: if .*redirects"
    ):
        open_store(Url("http://127.0.0.1:9"), options).describe("x")


@pytest.mark.parametrize("from_environment", [False, True])
def test_a_session_token_is_not_sent_to_another_host(monkeypatch: pytest.MonkeyPatch, from_environment: bool) -> None:
    keys = {"access_key_id": "key", "secret_access_key": "secret", "token": "SECRET"}
    if from_environment:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_SESSION_TOKEN", "SECRET")
    there: list[str] = []
    with serve(there) as other, serve([], f"http://localhost:{other}/moved") as port:
        options = StoreOptions(
            endpoint=f"http://127.0.0.1:{port}",
            region="us-east-1",
            credentials=None if from_environment else lambda: keys,
            retries=1,
        )
        with pytest.raises(ReadError, match=r"s3://bucket/x: the server redirects to another host.*endpoint="):
            open_store(Url("s3://bucket"), options).read_range("x", 0, 4)
    assert there == []


def test_redirects_within_a_host_are_followed() -> None:
    keys = {"access_key_id": "key", "secret_access_key": "secret", "token": "SECRET"}
    with serve([], "/bucket/moved") as port:
        options = StoreOptions(endpoint=f"http://127.0.0.1:{port}", region="us-east-1", credentials=lambda: keys)
        assert open_store(Url("s3://bucket"), options).read_range("x", 0, 4) == b"1234"


def test_certificates_of_ones_own_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ca.pem").write_bytes(b"certificates")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))
    assert obstore_config("s3", StoreOptions(), None)["client_options"]["root_certificate"] == b"certificates"
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "none"))
    with pytest.raises(OptionError, match="AWS_CA_BUNDLE must name a file of certificates"):
        obstore_config("s3", StoreOptions(), None)


def test_other_clouds_are_told_their_options() -> None:
    assert obstore_config("gs", StoreOptions(endpoint="http://localhost"), None) == {
        "base_url": "http://localhost",
        "client_options": {"allow_http": True},
    }
    assert obstore_config("az", StoreOptions(endpoint="https://localhost"), None) == {
        "endpoint": "https://localhost",
        "client_options": {"allow_http": False},
    }


def test_without_packages_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("obstore", "obstore.store"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependency, match=r"pip install 'penstock\[remote\]'"):
        open_store(Url("s3://bucket/never"), StoreOptions(retries=9)).describe("x")
