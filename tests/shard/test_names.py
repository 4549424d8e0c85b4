"""Different ids have different keys, and ambiguous names are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import OptionError
from penstock.shard.names import (
    automatic_key,
    check_fields,
    encode_key,
    field_name,
    field_names,
    member_suffix,
    split_name,
    stored_extension,
)

ids = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)
tricky = st.text("a%2E.F/\\\0 é", min_size=1, max_size=8)


@given(st.lists(ids | tricky, unique=True, min_size=2, max_size=20))
def test_different_ids_have_different_keys(some: list[str]) -> None:
    assert len({encode_key(one) for one in some}) == len(some)


@given(ids | tricky)
def test_a_key_is_one_plain_part_of_a_name(sample_id: str) -> None:
    key = encode_key(sample_id)
    assert key
    assert not set("./\\\0\n\x7f") & set(key)
    assert split_name(f"{key}.field.npy") == (key, "field.npy")


@given(ids)
def test_an_id_without_special_characters_is_its_own_key(sample_id: str) -> None:
    plain = "".join(letter for letter in sample_id if letter.isalnum() or letter in "-_ ") or "a"
    assert encode_key(plain) == plain


def test_control_characters_dots_and_slashes_are_encoded_and_nothing_else() -> None:
    assert encode_key("a\x00\x1f b\x7f\x80./\\%~") == "a%00%1F b%7F\x80%2E%2F%5C%25~"


def test_percent_signs_are_encoded_too() -> None:
    assert encode_key("a.b") == "a%2Eb"
    assert encode_key("a%2Eb") == "a%252Eb"


@pytest.mark.parametrize("sample_id", ["", None, 7, b"a", "\ud800"])
def test_an_id_must_be_text(sample_id: object) -> None:
    with pytest.raises(OptionError, match="sample_id must be"):
        encode_key(sample_id)  # type: ignore[arg-type]


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_automatic_keys_count(one: int, other: int) -> None:
    assert (automatic_key(one) == automatic_key(other)) is (one == other)
    assert encode_key(automatic_key(one)) == automatic_key(one)


@pytest.mark.parametrize("name", ["x", "lfp.left", "x y", "é", "_private", "npy", "a-b", "x.npy"])
def test_fields_may_be_named_freely(name: str) -> None:
    check_fields([name], "metadata")


@pytest.mark.parametrize(
    ("names", "match"),
    [
        ([""], "A field name must be"),
        ([7], "A field name must be"),
        ([None], "A field name must be"),
        (["a\0b"], "printable"),
        (["a\nb"], "printable"),
        (["\ud800"], "printable"),
        (["metadata"], "is reserved"),
        (["__key__"], "is reserved"),
        (["a/b"], "slash"),
        (["a\\b"], "slash"),
        ([".a"], "dots only inside"),
        (["a."], "dots only inside"),
        (["a..b"], "dot"),
        (["x", "X"], "differ in more than case, got 'x' and 'X'"),
        (["lfp.Left", "lfp.left"], "differ in more than case"),
        # The webdataset library lowers names, so this is the reserved one.
        (["Metadata"], "(is reserved|differ in more than case)"),
    ],
)
def test_ambiguous_field_names_are_refused(names: list[str], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        check_fields(names, "metadata")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a.npy", ("a", "npy")),
        ("a.x.npy", ("a", "x.npy")),
        ("data/a.x.npy", ("data/a", "x.npy")),
        ("da.ta/a.x", ("da.ta/a", "x")),
        ("./a.x", ("./a", "x")),
        ("a", ("", "")),
        ("a.", ("", "")),
        (".hidden", ("", "")),
        ("data/.hidden", ("", "")),
        ("", ("", "")),
    ],
)
def test_names_are_split_at_the_first_dot_after_the_last_slash(name: str, parts: tuple[str, str]) -> None:
    assert split_name(name) == parts


@given(
    st.lists(
        st.sampled_from(["x.npy", "x.json", "x", "npy", "jpg", "x.jpg", "y.npy", "y.y.npy", "metadata.json"]),
        unique=True,
    )
)
def test_no_two_suffixes_become_one_field(suffixes: list[str]) -> None:
    named = field_names(suffixes)
    assert list(named) == suffixes
    assert len(set(named.values())) == len(suffixes)


def test_a_decodable_extension_is_not_part_of_the_field_name() -> None:
    assert field_names(["spikes.npy", "metadata.json", "jpg", "left.png"]) == {
        "spikes.npy": "spikes",
        "metadata.json": "metadata",
        "jpg": "jpg",
        "left.png": "left.png",
    }


_parts = st.sampled_from(["a", "png", "PNG", "wav", "txt", "TXT", "json", "npy", "bin", "pyd", "text"])


@given(
    name=st.lists(_parts, min_size=1, max_size=3).map(".".join),
    extension=st.sampled_from(["npy", "pyd", "txt", "json", "bin", "own"]),
)
def test_a_suffix_gives_back_the_name_of_its_field(name: str, extension: str) -> None:
    extension = stored_extension(name) if extension == "own" else extension
    suffix = member_suffix(name, extension)
    assert field_name(suffix) == name
    assert suffix.lower().rpartition(".")[2] == extension


@pytest.mark.parametrize(
    ("name", "extension"),
    [
        *((name, name) for name in ("png", "wav", "mp4", "txt", "json")),
        ("x.JPG", "jpg"),
        *((name, "bin") for name in ("raw", "text", "npy", "pyd", "cls", "png.raw")),
    ],
)
def test_bytes_have_the_extension_of_files_in_their_name(name: str, extension: str) -> None:
    assert stored_extension(name) == extension
