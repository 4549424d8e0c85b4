"""URLs are never paths, and hold no credentials."""

import pickle
from pathlib import Path

import pytest

from penstock import OptionError
from penstock.files.stores.url import Url, is_url, parse_place


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("s3://bucket/train/", "s3://bucket/train"),
        (Path("s3://bucket/train"), "s3://bucket/train"),
        ("S3://bucket", "s3://bucket"),
        ("https://example.org/a%20b/", "https://example.org/a%20b"),
        (Path("http://localhost:80/x"), "http://localhost:80/x"),
        ("file:///data/x", "file:///data/x"),
        (Path("file:///data/x"), "file:///data/x"),
        ("file:///", "file:///"),
        ("hf://datasets/Ada/Words@v1/a b#c.tar", "https://huggingface.co/datasets/Ada/Words/resolve/v1/a%20b%23c.tar"),
        ("HF:/Ada/Model", "https://huggingface.co/Ada/Model/resolve/main"),
    ],
)
def test_urls_are_told_from_paths(given: str | Path, text: str) -> None:
    found = parse_place(given)
    assert isinstance(found, Url)
    assert str(found) == text
    assert parse_place(found) is found
    assert is_url(given)


@pytest.mark.parametrize("given", ["data/x", "/data/x", Path("data"), "c:/data", "a:b", "http:x"])
def test_paths_are_no_urls(given: str | Path) -> None:
    assert parse_place(given) == Path(given).absolute()
    assert not is_url(given)


def test_a_url_is_taken_apart_as_a_path_is() -> None:
    url = Url("s3://bucket/train/shard.tar")
    assert (url.scheme, url.root, url.path, url.name) == ("s3", "s3://bucket", "train/shard.tar", "shard.tar")
    assert url.parent == Url("s3://bucket/train")
    assert url.parent.parent == url.parent.parent.parent == Url("s3://bucket")
    assert url.with_name("b") == Url("s3://bucket/train/b")
    assert Url("file:///") / "a" == Url("file:///a")


def test_names_in_http_urls_are_quoted() -> None:
    url = Url("https://example.org/a%20b") / "c d%.nwb"
    assert str(url) == "https://example.org/a%20b/c%20d%25.nwb"
    assert (url.path, url.name) == ("a b/c d%.nwb", "c d%.nwb")
    assert (Url("s3://bucket") / "c d%.nwb").path == "c d%.nwb"


def test_urls_are_values() -> None:
    a, b = Url("s3://bucket/a/"), Url("s3://bucket/b")
    assert {a, Url("s3://bucket/a")} == {a}
    assert sorted([b, a]) == [a, b]
    assert pickle.loads(pickle.dumps(a)) == a


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("s3://", "must name a bucket or a server"),
        ("https://me:secret@host/x", "must hold no password"),
        ("https://me@host/x", "must hold no password"),
        ("https://host/x?X-Amz-Signature=secret", "must have no query"),
        ("s3://bucket/a//b", "none of them empty"),
        ("s3://bucket//b", "none of them empty"),
        ("s3://bucket/../b", r"`\.\.`"),
        ("bucket", "SCHEME://PLACE"),
    ],
)
def test_other_urls_are_refused_without_a_word_of_what_may_be_secret(text: str, said: str) -> None:
    with pytest.raises(OptionError, match=said) as caught:
        Url(text)
    assert "secret" not in str(caught.value)
