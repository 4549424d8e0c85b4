"""All errors have one base class, and each is the builtin that a caller would catch."""

import pickle

import pytest

from penstock.core import errors


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("OptionError", ValueError),
        ("SourceError", ValueError),
        ("PlanError", ValueError),
        ("ReadError", OSError),
        ("DamageError", OSError),
        ("WriteError", OSError),
        ("ResumeError", ValueError),
        ("WorkerError", RuntimeError),
        ("LoaderError", RuntimeError),
        ("MissingDependency", ImportError),
    ],
)
def test_every_error_is_a_penstock_error_and_the_builtin_it_stands_for(name: str, builtin: type[Exception]) -> None:
    assert issubclass(getattr(errors, name), errors.PenstockError)
    assert issubclass(getattr(errors, name), builtin)


def test_source_and_plan_errors_are_option_errors() -> None:
    assert issubclass(errors.SourceError, errors.OptionError)
    assert issubclass(errors.PlanError, errors.OptionError)


def test_damage_is_a_read_error_and_a_failed_write_is_not() -> None:
    assert issubclass(errors.DamageError, errors.ReadError)
    assert not issubclass(errors.WriteError, errors.ReadError)


def test_every_error_is_listed_and_public() -> None:
    import penstock

    for name in errors.__all__:
        assert getattr(penstock, name) is getattr(errors, name)


@pytest.mark.parametrize(
    ("item", "message"),
    [(7, "Damaged: item 7 in shard_000001.tar: a bit"), (None, "Damaged: shard_000001.tar: a bit")],
)
def test_damage_names_the_shard_the_item_and_the_reason(item: int | None, message: str) -> None:
    error = errors.DamageError("shard_000001.tar", item, "a bit")
    assert str(error) == message
    assert (error.shard, error.item, error.reason) == ("shard_000001.tar", item, "a bit")


@pytest.mark.parametrize("item", [7, None])
def test_damage_errors_survive_pickling(item: int | None) -> None:
    again = pickle.loads(pickle.dumps(errors.DamageError("shard_000001.tar", item, "a bit")))
    assert type(again) is errors.DamageError
    assert (again.shard, again.item, again.reason) == ("shard_000001.tar", item, "a bit")
    assert str(again) == str(errors.DamageError("shard_000001.tar", item, "a bit"))


def test_a_missing_package_says_what_for_and_how_to_get_it() -> None:
    error = errors.MissingDependency("Pillow", "image", "Decoding images")
    assert str(error) == "Decoding images needs Pillow; install it with: pip install 'penstock[image]'"


def test_missing_dependency_errors_survive_pickling() -> None:
    error = errors.MissingDependency("Pillow", "image", "Decoding images")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (errors.MissingDependency, str(error))


def test_many_inputs_that_could_not_be_converted_fill_at_most_20_lines() -> None:
    same = {f"same{number}.nwb": "no lfp\n  It has many things." for number in range(2_000)}
    each = {f"{number}.nwb": f"damaged at byte {number}" for number in range(980)}
    error = errors.ConversionError(same | each)
    lines = str(error).splitlines()
    assert len(lines) <= 20
    assert lines[0] == "2,980 inputs could not be converted, and nothing was published:"
    assert lines[1] == "  2,000 inputs (same0.nwb, same1.nwb, same2.nwb, …): no lfp"
    assert lines[2] == "  0.nwb: damaged at byte 0"
    assert lines[-2] == "  … and 965 more."
    assert len(error.reasons) == 2_980
    alone = str(errors.ConversionError({"a.nwb": "no lfp\n  It has eeg."}))
    assert alone.splitlines()[1:3] == ["  a.nwb: no lfp", "  It has eeg."]
