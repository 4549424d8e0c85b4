"""From a YAML file to a data module and the arguments of a Trainer; misspelled keys are errors."""

import inspect
import logging
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from penstock.core.checks import check_choice, check_keys, option_names
from penstock.core.errors import MissingDependency, OptionError, PenstockError
from penstock.files.regular import open_regular
from penstock.recipes.chunked.audio import ChunkedQuantizedAutoregressiveAudio
from penstock.recipes.chunked.datasets import ChunkedSequenceDataset
from penstock.recipes.trainers.lightning import PenstockDataModule

try:
    from lightning.pytorch import Trainer
except ImportError as error:
    raise MissingDependency("lightning", "lightning", "build_from_config") from error

__all__ = ["Built", "build_from_config"]

_LOG = logging.getLogger("penstock")

_SECTIONS = ("train", "trainer", "loader", "dataset")
_SIZES = ("train_chunk_size", "val_chunk_size")
_LIMITS = ("limit_train_batches", "limit_val_batches")
_NAMED: Mapping[str, type[ChunkedSequenceDataset]] = {"qautoaudio": ChunkedQuantizedAutoregressiveAudio}


class Built(NamedTuple):
    """The result of a configuration, for `Trainer(**trainer).fit(model, datamodule=data)`."""

    data: PenstockDataModule
    trainer: dict[str, Any]


def build_from_config(config: Any, *, data: type[ChunkedSequenceDataset] | None = None) -> Built:
    """Return the data module and the Trainer arguments that a configuration describes.

    It uses the sections `train` (`train_chunk_size`, `val_chunk_size`, `seed`), `trainer` (arguments of Lightning's
    Trainer), `loader` (arguments of torch's DataLoader) and `dataset` (arguments of the data module, whose name is
    `_name_`). Other sections, and other keys of `train`, are yours. With chunk sizes, `limit_train_batches` and
    `limit_val_batches` are left out of the result, with a warning; without, they are passed on.

    Parameters
    ----------
    config
        The path of a YAML file, an OmegaConf or Hydra configuration, or a mapping.
    data
        The class of the data module; None: the one named by `dataset._name_` (`qautoaudio`).

    Raises
    ------
    OptionError
        A key is unknown (the message has the nearest known one), or contradicts another.
    """
    sections = _read_sections(config)
    train, trainer = sections["train"], dict(sections["trainer"])
    target = trainer.pop("_target_", "Trainer")  # Hydra's
    if str(target).rpartition(".")[2] != "Trainer":
        raise OptionError(f"trainer._target_ must be Lightning's Trainer, got {target!r}. Leave it out.")
    _check_near("train", train, (*_SIZES, *_LIMITS, "seed"))
    check_keys("Keys of trainer", trainer, option_names(Trainer))
    check_keys("Keys of loader", sections["loader"], option_names(DataLoader)[1:])
    limits = _limits(train, trainer)
    sizes = {name: train.get(name) for name in _SIZES}
    arguments = {name: value for name, value in trainer.items() if name not in _LIMITS}
    if all(size is None for size in sizes.values()):
        arguments |= limits
        limits = {}
    elif "shuffle" in sections["loader"]:
        raise OptionError(
            f"loader.shuffle must not be set with chunk sizes, got {sections['loader']['shuffle']!r}. Leave it out: "
            "training is shuffled, and validation is in order."
        )
    seed = {"seed": train["seed"]} if train.get("seed") is not None else {}
    module = _make_module(sections["dataset"], data, {**sizes, "limits": limits, **seed})
    return Built(PenstockDataModule(module, sections["loader"]), arguments)


def _read_sections(config: Any) -> dict[str, dict[str, Any]]:
    try:
        from omegaconf import OmegaConf  # noqa: PLC0415  # an extra
        from omegaconf.errors import OmegaConfBaseException  # noqa: PLC0415
        from yaml import YAMLError  # type: ignore[import-untyped]  # noqa: PLC0415  # comes with it
    except ImportError as error:
        raise MissingDependency("omegaconf", "yaml", "build_from_config") from error
    try:
        if isinstance(config, str | Path):
            with open_regular(config) as file:
                config = OmegaConf.load(file)
        elif isinstance(config, Mapping) and not OmegaConf.is_config(config):
            config = OmegaConf.create(dict(config))
        if not OmegaConf.is_dict(config):
            raise OptionError(
                f"A configuration must be a mapping of sections ({', '.join(_SECTIONS)}), got {type(config).__name__}."
            )
        _check_near("the configuration", map(str, config), _SECTIONS)
        # Section by section: other sections may hold references that only Hydra can resolve.
        found = {name: config.get(name) for name in _SECTIONS}
        sections = {
            name: OmegaConf.to_container(node, resolve=True, throw_on_missing=True) if OmegaConf.is_dict(node) else node
            for name, node in found.items()
        }
    except FileNotFoundError as error:
        raise OptionError(f"No configuration at {error.filename}. Give the path of a YAML file.") from error
    except PenstockError:
        raise
    except (OmegaConfBaseException, YAMLError, OSError, ValueError, RecursionError) as error:
        raise OptionError(f"Could not read the configuration: {error}") from error
    for name, section in sections.items():
        if section is not None and not isinstance(section, dict):
            raise OptionError(
                f"Section {name!r} of the configuration must be a mapping, such as `train_chunk_size: 2000` under "
                f"`train:`, got {section!r}."
            )
    return {name: _drop_notes(section) for name, section in sections.items()}


def _drop_notes(section: Any) -> dict[str, Any]:
    """Return a section without the keys that start with `__`: notes that other keys refer to, as in S4."""
    return {str(key): value for key, value in (section or {}).items() if not str(key).startswith("__")}


def _limits(train: Mapping[str, Any], trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits of both sections; they belong under `trainer`, but older files have them under `train`."""
    found = {name: trainer[name] for name in _LIMITS if trainer.get(name) is not None}
    for name in _LIMITS:
        if train.get(name) is None:
            continue
        if found.setdefault(name, train[name]) != train[name]:
            raise OptionError(
                f"train.{name} must equal trainer.{name}={found[name]!r}, got {train[name]!r}. Keep the latter only."
            )
        _LOG.warning("train.%s is deprecated. Put it under trainer.", name)
    return found


def _make_module(
    options: Mapping[str, Any], data: type[ChunkedSequenceDataset] | None, more: Mapping[str, Any]
) -> ChunkedSequenceDataset:
    given = dict(options)
    name = given.pop("_name_", None)
    if data is None:
        data = _NAMED[check_choice("Without data=, dataset._name_", name, _NAMED)]
    for key, value in more.items():
        if key in given and (key != "seed" or given[key] != value):
            raise OptionError(f"{key} must be set under train only, got dataset.{key}={given[key]!r}. Remove that.")
    known, open_ended = _options(data)
    if open_ended:  # near misses are errors; other keys are for its setup()
        _check_near("dataset", given, known)
    else:
        check_keys("Keys of dataset", given, sorted(known))
    try:
        return data(**{**more, **given})
    except TypeError as error:
        raise OptionError(f"The section dataset must have what {data.__name__} needs: {error}.") from error


def _options(data: type[ChunkedSequenceDataset]) -> tuple[set[str], bool]:
    """Return the options of a data module, and whether it accepts others, because all its classes take **kwargs."""
    known: set[str] = set()
    for kind in data.__mro__:
        if "__init__" not in vars(kind):
            continue
        parameters = inspect.signature(vars(kind)["__init__"]).parameters.values()
        known |= {one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
        if all(one.kind != one.VAR_KEYWORD for one in parameters):
            return known - {"self"}, False
    return known - {"self"}, True


def _check_near(section: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise OptionError for names that are probably misspelled ones of `known`; others are the user's own."""
    known = list(known)
    for name in given:
        if name not in known and (near := get_close_matches(name, known, n=1, cutoff=0.75)):
            raise OptionError(f"Unknown key {name!r} in {section}. Did you mean {near[0]!r}?")
