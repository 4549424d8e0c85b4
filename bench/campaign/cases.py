"""The 67 fault cases, and the tests that check each of them.

Each case ends in right data, or in one typed exception that names source, shard and sample within a stated time: never
a hang, never silence.
"""

from dataclasses import dataclass

__all__ = ["CASES", "Case"]


@dataclass(frozen=True)
class Case:
    """A fault, the files of the tests that cause it, and what of it cannot be caused on one Linux machine."""

    number: int
    group: str
    title: str
    tests: tuple[str, ...]
    """Files below `tests/`."""

    why_not: str | None = None
    """Why the case, or a part of it, cannot be run here, and what holds instead."""


WRITING = "Writing"
DAMAGE = "Stored damage"
HOSTILE = "Hostile input"
STORAGE = "Storage"
WORKERS = "Workers"
RESUME = "Order and resume"
RANKS = "Distributed"
SHAPES = "Shapes and values"
RESOURCES = "Resources"

CASES: tuple[Case, ...] = (
    Case(
        1,
        WRITING,
        "kill -9 at more than 200 moments of a write, then resume: byte for byte the undisturbed dataset",
        (
            "suites/test_kills.py",
            "faults/test_convert_killed.py",
            "files/test_staging.py",
        ),
    ),
    Case(
        2,
        WRITING,
        "kill -9 without resuming: the reader refuses, verify lists what was left",
        ("suites/test_kills.py", "shard/test_verify.py"),
    ),
    Case(
        3,
        WRITING,
        "full disk in the middle of a shard and of a manifest",
        ("shard/test_writer_disk.py", "faults/test_convert_disk.py"),
    ),
    Case(
        4,
        WRITING,
        "two writers, one folder: the second is refused",
        ("shard/test_writer_folder.py", "convert/test_convert.py", "files/test_locks.py"),
    ),
    Case(
        5,
        WRITING,
        "a target that is read-only, vanishes, or takes no more files",
        ("faults/test_convert_disk.py", "shard/test_writer_disk.py"),
    ),
    Case(
        6,
        WRITING,
        "an exception in the user's function: which input, nothing published",
        ("faults/test_convert_interrupted.py", "convert/inputs/test_function.py", "shard/test_writer.py"),
    ),
    Case(
        7,
        WRITING,
        "SIGTERM, as Slurm sends it: a clean stop that can be resumed",
        ("faults/test_stopped.py", "faults/test_convert_killed.py", "examples/test_demo.py"),
    ),
    Case(
        8,
        WRITING,
        "clock jumps and runs within the same second: the same bytes, no change unnoticed",
        ("faults/test_clock.py", "faults/test_shard_changes.py"),
    ),
    Case(
        9,
        WRITING,
        "keys that repeat, or have dots, unicode or `..`",
        ("shard/test_writer_samples.py", "shard/test_names.py"),
    ),
    Case(
        10,
        WRITING,
        "a sample larger than a shard may be, an empty sample, no samples",
        ("shard/test_writer.py", "shard/test_writer_samples.py"),
    ),
    Case(11, DAMAGE, "a shard truncated within a payload", ("suites/test_damage.py", "shard/test_tar.py")),
    Case(12, DAMAGE, "a shard truncated at the border of a member", ("suites/test_damage.py", "shard/test_tar.py")),
    Case(13, DAMAGE, "a flipped bit in the header of a member", ("faults/test_shard_damage.py", "shard/test_tar.py")),
    Case(
        14,
        DAMAGE,
        "a flipped bit in a payload, at every byte of a small shard",
        ("faults/test_shard_damage.py", "suites/test_damage.py"),
    ),
    Case(15, DAMAGE, "a missing shard", ("suites/test_damage.py", "faults/test_shard_damage.py")),
    Case(16, DAMAGE, "a shard too many, or of another dataset", ("suites/test_damage.py", "shard/test_verify.py")),
    Case(17, DAMAGE, "a shard swapped with another valid one", ("suites/test_damage.py",)),
    Case(18, DAMAGE, "a manifest older than its shards", ("suites/test_damage.py", "shard/test_index_tars.py")),
    Case(19, DAMAGE, "a manifest that is truncated or invalid", ("suites/test_damage.py", "shard/test_manifest.py")),
    Case(
        20,
        DAMAGE,
        "zarr: a missing chunk, a corrupt chunk, corrupt metadata",
        (
            "faults/test_zarr_damage.py",
            "faults/test_zarr_metadata.py",
            "faults/test_zarr_special_files.py",
            "source/stored/test_missing_chunks.py",
        ),
    ),
    Case(
        21,
        DAMAGE,
        "NWB and HDF5 files that are truncated or open for writing",
        ("convert/nwb/test_faults.py", "source/stored/test_other_formats.py"),
    ),
    Case(
        22,
        DAMAGE,
        "an audio header that lies about its length",
        ("convert/inputs/test_audio.py", "shard/decoders/test_decode.py"),
    ),
    Case(
        23,
        HOSTILE,
        "pickles: a member, an object array in a .npy, a torch.load payload",
        ("faults/test_shard_hostile.py", "shard/test_pickles.py"),
    ),
    Case(24, HOSTILE, "names that are absolute or have `../`", ("shard/test_tar.py", "faults/test_shard_hostile.py")),
    Case(25, HOSTILE, "members that are links or devices", ("shard/test_tar.py", "faults/test_shard_hostile.py")),
    Case(
        26,
        HOSTILE,
        "tar bomb, absurd size, a million members, deep PAX headers",
        ("faults/test_shard_hostile.py", "shard/test_tar.py"),
    ),
    Case(
        27,
        HOSTILE,
        "gzip, zstd and blosc bombs",
        (
            "faults/test_shard_hostile.py",
            "shard/test_compression.py",
            "shard/decoders/test_decode.py",
            "faults/test_zarr_damage.py",
        ),
    ),
    Case(
        28,
        HOSTILE,
        "a JSON bomb; NaN and Infinity in metadata",
        ("faults/test_shard_hostile.py", "shard/test_codec.py", "shard/test_codec_payloads.py"),
    ),
    Case(29, HOSTILE, "an address that would run a command", ("faults/test_shard_hostile.py",)),
    Case(
        30,
        STORAGE,
        "5xx, 429, a reset in mid-body, a short read, a wrong Content-Length",
        ("faults/test_http_store.py", "files/stores/test_faults.py"),
        "S3 is `rclone serve s3` behind a proxy that breaks its answers; no server of a cloud can be used here.",
    ),
    Case(
        31,
        STORAGE,
        "a store that stalls for 200 s: a deadline ends the wait",
        ("faults/test_http_store.py", "files/stores/test_stalls.py"),
        "With a shorter deadline than the one of two minutes.",
    ),
    Case(
        32,
        STORAGE,
        "credentials that expire in the middle of an epoch",
        ("faults/test_http_store.py", "files/stores/test_faults.py", "files/stores/test_credentials.py"),
        "A server that begins to answer 401 and 403; no cloud account can be used here.",
    ),
    Case(
        33,
        STORAGE,
        "an object that is replaced during an epoch",
        ("faults/test_shard_changes.py", "files/stores/test_faults.py", "files/stores/test_stores.py"),
    ),
    Case(
        34,
        STORAGE,
        "a cache folder that is full, deleted under us, or shared by 4 processes",
        (
            "faults/test_remote_cache_folder.py",
            "faults/test_remote_killed.py",
            "files/spans/test_folder.py",
            "files/spans/test_remote_folder.py",
            "laws/test_remote_cache.py",
        ),
    ),
    Case(
        35,
        STORAGE,
        "a stale NFS handle",
        ("source/test_native.py",),
        "No NFS can be mounted here; the kernel answers a stale map with the SIGBUS of a file that shrinks.",
    ),
    Case(
        36,
        WORKERS,
        "SIGKILL, SIGSEGV, out of memory or os._exit in a worker: replaced or raised, exact continuation",
        ("faults/test_worker_deaths.py", "faults/test_worker_replacement.py"),
        "The kernel's end for a worker that takes all memory is its SIGKILL, which is sent here by hand.",
    ),
    Case(
        37,
        WORKERS,
        "an exception in transform, collate, read-ahead thread or copy to the device",
        ("run/test_executors.py", "run/test_threads.py", "feed/test_device.py"),
        "There is no GPU here: the copy runs on a stand-in for its streams.",
    ),
    Case(38, WORKERS, "a transform that hangs: the timeout names the sample", ("faults/test_worker_hangs.py",)),
    Case(39, WORKERS, "a transform that cannot be pickled, under spawn", ("faults/test_worker_pickling.py",)),
    Case(
        40,
        WORKERS,
        "fork after the parent used zarr, h5py, asyncio and threads",
        (
            "faults/test_fork_after_use.py",
            "source/stored/test_workers.py",
            "source/stored/test_other_formats.py",
            "core/test_cache.py",
        ),
    ),
    Case(
        41,
        WORKERS,
        "spawn, forkserver and fork",
        ("faults/test_worker_replacement.py", "laws/test_loader_order.py"),
        "There is no macOS here; its start method, spawn, runs on Linux.",
    ),
    Case(
        42, WORKERS, "a loader inside another, two at once, one inside a thread", ("faults/test_loaders_together.py",)
    ),
    Case(
        43,
        WORKERS,
        "Ctrl-C during an epoch, while workers start, while resuming",
        ("faults/test_interrupts.py", "faults/test_stopped.py"),
    ),
    Case(44, RESUME, "workers 0 to 4 x ranks 1 to 4 x batch sizes: one global order", ("laws/test_loader_order.py",)),
    Case(
        45, RESUME, "resume after every step of a small epoch", ("suites/test_loaders.py", "laws/test_plan_resume.py")
    ),
    Case(
        46,
        RESUME,
        "three resumes in a row with other workers, ranks and batch sizes",
        ("laws/test_loader_resume_changed.py", "laws/test_plan_resume.py", "plan/test_cursor.py"),
    ),
    Case(
        47,
        RESUME,
        "a state before the first batch, after the last, at the edge of an epoch, loaded twice, in another process",
        ("suites/test_loaders.py", "laws/test_loader_resume.py"),
    ),
    Case(
        48,
        RESUME,
        "a state of another dataset, seed or version is refused",
        ("plan/test_cursor.py", "suites/test_loaders.py"),
    ),
    Case(49, RESUME, "batches made ahead and not delivered do not count", ("run/test_executors.py",)),
    Case(50, RESUME, "resume with a list of bad items that has grown since", ("faults/test_shard_substitutes.py",)),
    Case(
        51,
        RESUME,
        "augmentation has the same bits for any number of workers and after a resume",
        ("recipes/workersafe/test_workers.py", "feed/test_collate.py", "laws/test_loader_resume_changed.py"),
    ),
    Case(52, RESUME, "an index of 10⁹ samples: resume in less than 100 ms and 50 MB", ("laws/test_loader_resume.py",)),
    Case(
        53,
        RANKS,
        "uneven shards, 2 to 4 real gloo ranks: equally many steps, no hang",
        ("faults/test_ranks.py", "recipes/webdataset/test_ranks.py", "laws/test_plan_ranks.py"),
    ),
    Case(
        54,
        RANKS,
        "fewer samples than ranks; fewer shards than ranks",
        ("faults/test_ranks.py", "laws/test_loader_order.py"),
    ),
    Case(55, RANKS, "one rank raises: the others stop", ("faults/test_ranks.py",)),
    Case(
        56,
        RANKS,
        "a rank is killed, and the run restarts with fewer ranks",
        ("faults/test_ranks.py", "laws/test_plan_ranks.py"),
    ),
    Case(
        57,
        RANKS,
        "validation covers every sample exactly once",
        ("laws/test_plan_coverage.py", "laws/test_plan_ranks.py", "laws/test_loader_order.py", "faults/test_ranks.py"),
    ),
    Case(
        58,
        SHAPES,
        "a dataset or split of no samples",
        (
            "shard/test_writer.py",
            "source/test_array.py",
            "source/test_dataset.py",
            "convert/test_splits.py",
            "convert/test_convert.py",
        ),
    ),
    Case(
        59,
        SHAPES,
        "a chunk larger than the dataset, a window longer than the recording, a batch larger than the dataset",
        ("plan/test_plan.py", "convert/nwb/test_windows.py", "plan/test_orders.py", "source/stored/test_select.py"),
    ),
    Case(
        60,
        SHAPES,
        "NaN, infinities and constant data in statistics (deviation 0)",
        ("transform/test_moments.py", "transform/test_standardize.py"),
    ),
    Case(
        61,
        SHAPES,
        "dtypes and byte orders, 0-d, bool, structured, more than 2³¹ elements",
        ("shard/test_codec.py", "source/stored/test_source.py", "source/test_large.py"),
    ),
    Case(
        62,
        SHAPES,
        "`len` is what iterating gives, for every tail",
        ("laws/test_plan_coverage.py", "run/test_executors.py"),
    ),
    Case(
        63,
        RESOURCES,
        "after exit, exception and Ctrl-C: no process, thread, file, shared memory or semaphore left",
        ("faults/test_leaks.py", "faults/test_interrupts.py", "faults/test_stopped.py"),
    ),
    Case(64, RESOURCES, "200 epochs: the memory of no process grows", ("soak/test_epochs.py",)),
    Case(
        65,
        RESOURCES,
        "/dev/shm of 64 MB and 256 open files: works, or a clear message",
        ("faults/test_small_machine.py", "source/tar/test_files.py", "faults/test_shard_changes.py"),
    ),
    Case(
        66,
        RESOURCES,
        "one CPU of a large machine: threads and workers are as many as may run",
        ("faults/test_small_machine.py", "files/test_machine.py"),
        "One CPU of the two that there are here, by affinity and by a control group.",
    ),
    Case(
        67,
        RESOURCES,
        "the interpreter ends within a second of close()",
        ("faults/test_small_machine.py", "faults/test_leaks.py"),
    ),
)
