"""Feeds PyTorch training from scientific data that does not fit in memory.

Names are loaded when they are first used, so that `import penstock` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.core.errors import DamageError as DamageError
    from penstock.core.errors import LoaderError as LoaderError
    from penstock.core.errors import MissingDependency as MissingDependency
    from penstock.core.errors import OptionError as OptionError
    from penstock.core.errors import PenstockError as PenstockError
    from penstock.core.errors import PlanError as PlanError
    from penstock.core.errors import ReadError as ReadError
    from penstock.core.errors import ResumeError as ResumeError
    from penstock.core.errors import SourceError as SourceError
    from penstock.core.errors import WorkerError as WorkerError
    from penstock.core.errors import WriteError as WriteError
    from penstock.core.index import Index as Index
    from penstock.core.protocols import Observer as Observer
    from penstock.core.protocols import Order as Order
    from penstock.core.protocols import Source as Source
    from penstock.core.protocols import Transform as Transform
    from penstock.core.seeds import generator_for as generator_for
    from penstock.core.types import Arrangement as Arrangement
    from penstock.core.types import Block as Block
    from penstock.core.types import Draw as Draw
    from penstock.core.types import Field as Field
    from penstock.core.types import Span as Span
    from penstock.feed.loader import Loader as Loader
    from penstock.feed.memory import MemoryEstimate as MemoryEstimate
    from penstock.plan.cursor import Cursor as Cursor
    from penstock.plan.lanes import World as World
    from penstock.plan.order import Balanced as Balanced
    from penstock.plan.order import RandomChunks as RandomChunks
    from penstock.plan.order import Sequential as Sequential
    from penstock.plan.order import Shuffle as Shuffle
    from penstock.plan.order import Subset as Subset
    from penstock.plan.order import WindowShuffle as WindowShuffle
    from penstock.plan.plan import Plan as Plan
    from penstock.plan.quality import Mixing as Mixing
    from penstock.plan.segments import Segments as Segments
    from penstock.recipes.dataset_info import ShardedDatasetInfo as ShardedDatasetInfo
    from penstock.recipes.webdataset import ResumableWebDatasetLoader as ResumableWebDatasetLoader
    from penstock.recipes.webdataset import WebDatasetLoader as WebDatasetLoader
    from penstock.recipes.webdataset import create_webdataset_dataloader as create_webdataset_dataloader
    from penstock.recipes.webdataset_collate import collate_webdataset as collate_webdataset
    from penstock.recipes.webdataset_writing import WebDatasetWriter as WebDatasetWriter
    from penstock.recipes.webdataset_writing import create_shards_from_arrays as create_shards_from_arrays
    from penstock.run.options import RunOptions as RunOptions
    from penstock.run.timing import Timings as Timings
    from penstock.source.array import ArraySource as ArraySource
    from penstock.source.combine import Concat as Concat
    from penstock.source.combine import Take as Take
    from penstock.source.combine import Zip as Zip
    from penstock.source.dataset import DatasetSource as DatasetSource
    from penstock.source.tar import TarSource as TarSource

__version__ = "0.1.0"

_MODULES = {
    "core.errors": (
        "DamageError LoaderError MissingDependency OptionError PenstockError PlanError ReadError ResumeError "
        "SourceError WorkerError WriteError"
    ),
    "core.index": "Index",
    "core.protocols": "Observer Order Source Transform",
    "core.seeds": "generator_for",
    "core.types": "Arrangement Block Draw Field Span",
    "feed.loader": "Loader",
    "feed.memory": "MemoryEstimate",
    "plan.cursor": "Cursor",
    "plan.lanes": "World",
    "plan.order": "Balanced RandomChunks Sequential Shuffle Subset WindowShuffle",
    "plan.plan": "Plan",
    "plan.quality": "Mixing",
    "plan.segments": "Segments",
    "recipes.dataset_info": "ShardedDatasetInfo",
    "recipes.webdataset": "ResumableWebDatasetLoader WebDatasetLoader create_webdataset_dataloader",
    "recipes.webdataset_collate": "collate_webdataset",
    "recipes.webdataset_writing": "WebDatasetWriter create_shards_from_arrays",
    "run.options": "RunOptions",
    "run.timing": "Timings",
    "source.array": "ArraySource",
    "source.combine": "Concat Take Zip",
    "source.dataset": "DatasetSource",
    "source.tar": "TarSource",
}
_HOMES = {name: f"penstock.{module}" for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_HOMES)  # noqa: PLE0605  # derived, so that a name is listed once


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
