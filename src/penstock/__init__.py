"""Feeds PyTorch training from scientific data that does not fit in memory.

Names are loaded when they are first used, so that `import penstock` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.convert.arrays import NpyInput as NpyInput
    from penstock.convert.audio import AudioInput as AudioInput
    from penstock.convert.engines import DaskEngine as DaskEngine
    from penstock.convert.engines import LocalEngine as LocalEngine
    from penstock.convert.formats import ReadOptions as ReadOptions
    from penstock.convert.formats import inputs_of as inputs_of
    from penstock.convert.inputs import Input as Input
    from penstock.convert.inputs import Recording as Recording
    from penstock.convert.npz import NpzInput as NpzInput
    from penstock.convert.nwb import NWBInput as NWBInput
    from penstock.convert.nwb import NWBOptions as NWBOptions
    from penstock.convert.planning import ConvertOptions as ConvertOptions
    from penstock.convert.samples import FunctionInput as FunctionInput
    from penstock.convert.shards import ShardsInput as ShardsInput
    from penstock.convert.splits import Split as Split
    from penstock.convert.zarrs import ZarrInput as ZarrInput
    from penstock.core.errors import ConversionError as ConversionError
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
    from penstock.plan.listed import Listed as Listed
    from penstock.plan.order import Balanced as Balanced
    from penstock.plan.order import RandomChunks as RandomChunks
    from penstock.plan.order import Sequential as Sequential
    from penstock.plan.order import Shuffle as Shuffle
    from penstock.plan.order import Subset as Subset
    from penstock.plan.order import WindowShuffle as WindowShuffle
    from penstock.plan.plan import Plan as Plan
    from penstock.plan.quality import Mixing as Mixing
    from penstock.plan.segments import Segments as Segments
    from penstock.plan.spans import BalancedSpans as BalancedSpans
    from penstock.recipes.accelerate import prepare_loader as prepare_loader
    from penstock.recipes.audio import ChunkedQuantizedAudioDataset as ChunkedQuantizedAudioDataset
    from penstock.recipes.audio import ChunkedQuantizedAutoregressiveAudio as ChunkedQuantizedAutoregressiveAudio
    from penstock.recipes.audio import QuantizedAudioDataset as QuantizedAudioDataset
    from penstock.recipes.audio import QuantizedAutoregressiveAudio as QuantizedAutoregressiveAudio
    from penstock.recipes.audio_collate import collate_audio as collate_audio
    from penstock.recipes.cellmap_dataset import CellMapDataset as CellMapDataset
    from penstock.recipes.cellmap_dataset import split_target_path as split_target_path
    from penstock.recipes.cellmap_image import CellMapImage as CellMapImage
    from penstock.recipes.cellmap_image import EmptyImage as EmptyImage
    from penstock.recipes.cellmap_loader import CellMapDataLoader as CellMapDataLoader
    from penstock.recipes.cellmap_multi import CellMapDataSplit as CellMapDataSplit
    from penstock.recipes.cellmap_multi import CellMapMultiDataset as CellMapMultiDataset
    from penstock.recipes.cellmap_sampling import ClassBalancedSampler as ClassBalancedSampler
    from penstock.recipes.cellmap_sampling import MutableSubsetRandomSampler as MutableSubsetRandomSampler
    from penstock.recipes.cellmap_sampling import min_redundant_inds as min_redundant_inds
    from penstock.recipes.cellmap_writer import CellMapDatasetWriter as CellMapDatasetWriter
    from penstock.recipes.chunk_profile import PipelineProfiler as PipelineProfiler
    from penstock.recipes.chunk_sampling import ChunkLatencyStats as ChunkLatencyStats
    from penstock.recipes.chunk_sampling import calculate_chunk_params as calculate_chunk_params
    from penstock.recipes.chunk_sampling import compute_neuron_phases as compute_neuron_phases
    from penstock.recipes.chunk_sampling import generate_random_chunks as generate_random_chunks
    from penstock.recipes.chunk_sampling import sample_batch_indices as sample_batch_indices
    from penstock.recipes.chunk_sampling import sample_batch_within_chunk as sample_batch_within_chunk
    from penstock.recipes.chunk_stream import Chunk as Chunk
    from penstock.recipes.chunk_stream import PipelineChunkLoader as PipelineChunkLoader
    from penstock.recipes.chunk_stream import RandomChunkLoader as RandomChunkLoader
    from penstock.recipes.chunked_epochs import ChunkedDataLoader as ChunkedDataLoader
    from penstock.recipes.chunked_epochs import ChunkedSampler as ChunkedSampler
    from penstock.recipes.chunked_training import ChunkedSequenceDataset as ChunkedSequenceDataset
    from penstock.recipes.chunked_training import ChunkedTrainingMixin as ChunkedTrainingMixin
    from penstock.recipes.chunked_training import ChunkSizes as ChunkSizes
    from penstock.recipes.chunked_training import SequenceDataset as SequenceDataset
    from penstock.recipes.chunked_training import resolve_chunk_sizes as resolve_chunk_sizes
    from penstock.recipes.configuration import build_from_config as build_from_config
    from penstock.recipes.conversion import NWBToWebDatasetConverter as NWBToWebDatasetConverter
    from penstock.recipes.conversion import convert_to_shards as convert_to_shards
    from penstock.recipes.cross_validation import cross_val_training as cross_val_training
    from penstock.recipes.cross_validation import single_fold_training as single_fold_training
    from penstock.recipes.dataloader_factory import DataLoaderConfigLogger as DataLoaderConfigLogger
    from penstock.recipes.dataloader_factory import OptimalDataLoaderFactory as OptimalDataLoaderFactory
    from penstock.recipes.dataset_info import ShardedDatasetInfo as ShardedDatasetInfo
    from penstock.recipes.flyvis import DataSplit as DataSplit
    from penstock.recipes.flyvis import FlyVisSim as FlyVisSim
    from penstock.recipes.flyvis import NeuronData as NeuronData
    from penstock.recipes.flyvis import SimulationWriter as SimulationWriter
    from penstock.recipes.flyvis import create_zarr_loader as create_zarr_loader
    from penstock.recipes.flyvis import load_column_slice as load_column_slice
    from penstock.recipes.flyvis import load_metadata as load_metadata
    from penstock.recipes.folds import Fold as Fold
    from penstock.recipes.folds import FoundFolds as FoundFolds
    from penstock.recipes.folds import FoundSplit as FoundSplit
    from penstock.recipes.folds import best_grouped_folds as best_grouped_folds
    from penstock.recipes.folds import best_grouped_split as best_grouped_split
    from penstock.recipes.folds import grouped_folds as grouped_folds
    from penstock.recipes.folds import search_best_group_seed as search_best_group_seed
    from penstock.recipes.folds import search_best_group_seed_kfold as search_best_group_seed_kfold
    from penstock.recipes.folds import stratified_folds as stratified_folds
    from penstock.recipes.folds import stratified_split as stratified_split
    from penstock.recipes.lightning import ChunkProgress as ChunkProgress
    from penstock.recipes.lightning import PenstockDataModule as PenstockDataModule
    from penstock.recipes.performance_monitor import DataLoaderPerformanceMonitor as DataLoaderPerformanceMonitor
    from penstock.recipes.performance_monitor import quick_benchmark as quick_benchmark
    from penstock.recipes.reporting import write_report as write_report
    from penstock.recipes.training_engine import TrainingEngine as TrainingEngine
    from penstock.recipes.training_engine import class_weights as class_weights
    from penstock.recipes.training_engine import labels_of as labels_of
    from penstock.recipes.training_plot import plot_results as plot_results
    from penstock.recipes.training_results import aggregate_predictions as aggregate_predictions
    from penstock.recipes.training_results import format_results as format_results
    from penstock.recipes.training_results import write_results_csv as write_results_csv
    from penstock.recipes.tuned import Tuning as Tuning
    from penstock.recipes.tuning import tune as tune
    from penstock.recipes.webdataset import ResumableWebDatasetLoader as ResumableWebDatasetLoader
    from penstock.recipes.webdataset import WebDatasetLoader as WebDatasetLoader
    from penstock.recipes.webdataset import create_webdataset_dataloader as create_webdataset_dataloader
    from penstock.recipes.webdataset_collate import collate_webdataset as collate_webdataset
    from penstock.recipes.webdataset_writing import WebDatasetWriter as WebDatasetWriter
    from penstock.recipes.webdataset_writing import create_shards_from_arrays as create_shards_from_arrays
    from penstock.recipes.worker_safe import AugmentedDataset as AugmentedDataset
    from penstock.recipes.worker_safe import StandardizedSubset as StandardizedSubset
    from penstock.recipes.worker_safe import WorkerSafeAugmentedDataset as WorkerSafeAugmentedDataset
    from penstock.recipes.worker_safe import WorkerSafeStandardizedDataset as WorkerSafeStandardizedDataset
    from penstock.recipes.worker_safe import compute_standardization_stats as compute_standardization_stats
    from penstock.recipes.worker_safe import worker_init_fn as worker_init_fn
    from penstock.report.watch import Watch as Watch
    from penstock.report.watch import watch as watch
    from penstock.run.options import RunOptions as RunOptions
    from penstock.run.timing import Timings as Timings
    from penstock.shard.writer import WriteOptions as WriteOptions
    from penstock.source.array import ArraySource as ArraySource
    from penstock.source.audio import AudioSource as AudioSource
    from penstock.source.combine import Concat as Concat
    from penstock.source.combine import Numbered as Numbered
    from penstock.source.combine import Take as Take
    from penstock.source.combine import Zip as Zip
    from penstock.source.dataset import DatasetSource as DatasetSource
    from penstock.source.ngff import Multiscale as Multiscale
    from penstock.source.tar import TarSource as TarSource
    from penstock.source.volume import VolumeSource as VolumeSource
    from penstock.source.volume_array import VolumeArray as VolumeArray
    from penstock.source.zarr import ZarrSource as ZarrSource
    from penstock.transform.advice import get_augmentation_params as get_augmentation_params
    from penstock.transform.advice import get_recommended_params as get_recommended_params
    from penstock.transform.compose import Compose as Compose
    from penstock.transform.crops import RandomCrop as RandomCrop
    from penstock.transform.crops import RandomShift as RandomShift
    from penstock.transform.intensity import Binarize as Binarize
    from penstock.transform.intensity import Blur as Blur
    from penstock.transform.intensity import NanToNum as NanToNum
    from penstock.transform.intensity import Normalize as Normalize
    from penstock.transform.intensity import RandomContrast as RandomContrast
    from penstock.transform.intensity import RandomGamma as RandomGamma
    from penstock.transform.moments import Moments as Moments
    from penstock.transform.noise import Clip as Clip
    from penstock.transform.noise import GaussianNoise as GaussianNoise
    from penstock.transform.noise import RandomGain as RandomGain
    from penstock.transform.quantize import dequantize as dequantize
    from penstock.transform.quantize import linear_decode as linear_decode
    from penstock.transform.quantize import linear_encode as linear_encode
    from penstock.transform.quantize import mu_law_decode as mu_law_decode
    from penstock.transform.quantize import mu_law_encode as mu_law_encode
    from penstock.transform.quantize import q_zero as q_zero
    from penstock.transform.quantize import quantize as quantize
    from penstock.transform.spatial import Spatial as Spatial
    from penstock.transform.spatial_fields import SpatialArray as SpatialArray
    from penstock.transform.specaugment import SpecAugment as SpecAugment
    from penstock.transform.standardize import Standardize as Standardize

__version__ = "0.1.0"

_MODULES = {
    "convert.arrays": "NpyInput",
    "convert.audio": "AudioInput",
    "convert.engines": "DaskEngine LocalEngine",
    "convert.formats": "ReadOptions inputs_of",
    "convert.inputs": "Input Recording",
    "convert.npz": "NpzInput",
    "convert.nwb": "NWBInput NWBOptions",
    "convert.planning": "ConvertOptions",
    "convert.samples": "FunctionInput",
    "convert.shards": "ShardsInput",
    "convert.splits": "Split",
    "convert.zarrs": "ZarrInput",
    "core.errors": (
        "ConversionError DamageError LoaderError MissingDependency OptionError PenstockError PlanError "
        "ReadError ResumeError SourceError WorkerError WriteError"
    ),
    "core.index": "Index",
    "core.protocols": "Observer Order Source Transform",
    "core.seeds": "generator_for",
    "core.types": "Arrangement Block Draw Field Span",
    "feed.loader": "Loader",
    "feed.memory": "MemoryEstimate",
    "plan.cursor": "Cursor",
    "plan.lanes": "World",
    "plan.listed": "Listed",
    "plan.order": "Balanced RandomChunks Sequential Shuffle Subset WindowShuffle",
    "plan.plan": "Plan",
    "plan.quality": "Mixing",
    "plan.segments": "Segments",
    "plan.spans": "BalancedSpans",
    "recipes.accelerate": "prepare_loader",
    "recipes.audio": (
        "ChunkedQuantizedAudioDataset ChunkedQuantizedAutoregressiveAudio QuantizedAudioDataset "
        "QuantizedAutoregressiveAudio"
    ),
    "recipes.audio_collate": "collate_audio",
    "recipes.cellmap_dataset": "CellMapDataset split_target_path",
    "recipes.cellmap_image": "CellMapImage EmptyImage",
    "recipes.cellmap_loader": "CellMapDataLoader",
    "recipes.cellmap_multi": "CellMapDataSplit CellMapMultiDataset",
    "recipes.cellmap_sampling": "ClassBalancedSampler MutableSubsetRandomSampler min_redundant_inds",
    "recipes.cellmap_writer": "CellMapDatasetWriter",
    "recipes.chunk_profile": "PipelineProfiler",
    "recipes.chunk_sampling": (
        "ChunkLatencyStats calculate_chunk_params compute_neuron_phases generate_random_chunks "
        "sample_batch_indices sample_batch_within_chunk"
    ),
    "recipes.chunk_stream": "Chunk PipelineChunkLoader RandomChunkLoader",
    "recipes.chunked_epochs": "ChunkedDataLoader ChunkedSampler",
    "recipes.chunked_training": (
        "ChunkSizes ChunkedSequenceDataset ChunkedTrainingMixin SequenceDataset resolve_chunk_sizes"
    ),
    "recipes.configuration": "build_from_config",
    "recipes.conversion": "NWBToWebDatasetConverter convert_to_shards",
    "recipes.cross_validation": "cross_val_training single_fold_training",
    "recipes.dataloader_factory": "DataLoaderConfigLogger OptimalDataLoaderFactory",
    "recipes.dataset_info": "ShardedDatasetInfo",
    "recipes.flyvis": (
        "DataSplit FlyVisSim NeuronData SimulationWriter create_zarr_loader load_column_slice load_metadata"
    ),
    "recipes.folds": (
        "Fold FoundFolds FoundSplit best_grouped_folds best_grouped_split grouped_folds "
        "search_best_group_seed search_best_group_seed_kfold stratified_folds stratified_split"
    ),
    "recipes.lightning": "ChunkProgress PenstockDataModule",
    "recipes.performance_monitor": "DataLoaderPerformanceMonitor quick_benchmark",
    "recipes.training_engine": "TrainingEngine class_weights labels_of",
    "recipes.training_plot": "plot_results",
    "recipes.training_results": "aggregate_predictions format_results write_results_csv",
    "recipes.tuned": "Tuning",
    "recipes.reporting": "write_report",
    "recipes.tuning": "tune",
    "recipes.webdataset": "ResumableWebDatasetLoader WebDatasetLoader create_webdataset_dataloader",
    "recipes.webdataset_collate": "collate_webdataset",
    "recipes.webdataset_writing": "WebDatasetWriter create_shards_from_arrays",
    "recipes.worker_safe": (
        "AugmentedDataset StandardizedSubset WorkerSafeAugmentedDataset WorkerSafeStandardizedDataset "
        "compute_standardization_stats worker_init_fn"
    ),
    "report.watch": "Watch watch",
    "run.options": "RunOptions",
    "run.timing": "Timings",
    "shard.writer": "WriteOptions",
    "source.array": "ArraySource",
    "source.audio": "AudioSource",
    "source.combine": "Concat Numbered Take Zip",
    "source.dataset": "DatasetSource",
    "source.ngff": "Multiscale",
    "source.tar": "TarSource",
    "source.volume": "VolumeSource",
    "source.volume_array": "VolumeArray",
    "source.zarr": "ZarrSource",
    "transform.advice": "get_augmentation_params get_recommended_params",
    "transform.compose": "Compose",
    "transform.crops": "RandomCrop RandomShift",
    "transform.intensity": "Binarize Blur NanToNum Normalize RandomContrast RandomGamma",
    "transform.moments": "Moments",
    "transform.noise": "Clip GaussianNoise RandomGain",
    "transform.quantize": "dequantize linear_decode linear_encode mu_law_decode mu_law_encode q_zero quantize",
    "transform.spatial": "Spatial",
    "transform.spatial_fields": "SpatialArray",
    "transform.specaugment": "SpecAugment",
    "transform.standardize": "Standardize",
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
