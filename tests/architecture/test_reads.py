"""Every path is opened for reading by `files/regular.py`, which refuses FIFOs, sockets and devices.

And every file is created by `files/durable.py` (or, a list, by `files/regular.py`): never through a link.
"""

import ast
from collections import Counter

from penstock_tree import MODULES, parse

# Calls that open a path, or that may be given one instead of an open file.
_NAMES = {"open", "FileIO", "SoundFile", "ZipFile", "TarFile", "NWBHDF5IO", "NWBZarrIO", "LocalStore", "ZipStore"}
_METHODS = {
    *("read_text", "read_bytes", "fromfile", "memmap", "open_memmap", "genfromtxt", "loadtxt", "read_csv"),
    *(_NAMES - {"open"}),
}
_QUALIFIED = {
    *("os.open", "io.open", "io.open_code", "tarfile.open", "zarr.open", "h5py.File", "np.load", "torch.load"),
    *("OmegaConf.load", "parquet.read_table", "soundfile.read", "soundfile.info", "Image.open", "mmap.mmap"),
    *("shutil.copy2", "shutil.copyfile", "gzip.open", "bz2.open", "lzma.open"),
}

_CHECKED = "the library opens the path itself; `check_regular`, `check_tree` or `open_input` comes before"
_OPEN = "it is given an open file or bytes"
_OURS = "the file is part of the package"
_ZARR = "penstock.source.stored.zarr."
EXCEPTIONS: dict[tuple[str, str], tuple[int, str]] = {
    ("penstock.files.regular", "os.open"): (2, "the one way, for reading and for lists"),
    ("penstock.files.regular", "open"): (1, _OPEN),
    ("penstock.files.regular", "FileIO"): (2, _OPEN),
    ("penstock.files.durable", "os.open"): (3, "creates files; opens a file or folder to sync it, without blocking"),
    ("penstock.files.locks", "os.open"): (2, "opens folders"),
    ("penstock.files.stores.clients.obstore_client", "LocalStore"): (1, _CHECKED),
    ("penstock.observe.check.storage", "os.open"): (1, "creates a file without a name, to write to"),
    ("penstock.core.doors", "open"): (1, _OURS),
    ("penstock.cli.errors", "os.open"): (1, "opens /dev/null"),
    ("penstock.convert.table", "parquet.read_table"): (1, _OPEN),
    ("penstock.convert.inputs.zarr", "LocalStore"): (1, _CHECKED),
    ("penstock.convert.inputs.zarr", "ZipStore"): (1, _CHECKED),
    ("penstock.convert.inputs.zarr", "zarr.open"): (2, _OPEN),
    ("penstock.convert.nwb.file", "NWBHDF5IO"): (2, _CHECKED),
    ("penstock.convert.nwb.file", "h5py.File"): (2, _CHECKED),
    ("penstock.convert.nwb.file", "NWBZarrIO"): (1, _CHECKED),
    ("penstock.recipes.crossval.cross_validation", "np.load"): (1, _OPEN),
    ("penstock.recipes.crossval.fold", "torch.load"): (1, _OPEN),
    ("penstock.recipes.trainers.config", "OmegaConf.load"): (1, _OPEN),
    ("penstock.observe.storage.pieces", "mmap.mmap"): (1, "maps a page of an open file, and does not read it"),
    ("penstock.run.processes.shared_pages", "mmap.mmap"): (1, "maps memory that has no path"),
    ("penstock.shard.decoders.audio", "SoundFile"): (1, _OPEN),
    ("penstock.shard.decoders.zips", "ZipFile"): (1, _OPEN),
    ("penstock.shard.decoders.decode", "torch.load"): (1, _OPEN),
    ("penstock.shard.decoders.images", "Image.open"): (1, _OPEN),
    ("penstock.source.numpy_files", "ZipFile"): (2, _OPEN),
    ("penstock.source.array", "memmap"): (1, _CHECKED),
    ("penstock.source.lengths", "memmap"): (1, _CHECKED),
    ("penstock.source.files.reader", "FileIO"): (1, _OPEN),
    ("penstock.source.stored.h5_file", "h5py.File"): (2, "a path that `check_regular` has opened, or a RemoteFile"),
    ("penstock.source.stored.npy", "memmap"): (1, _CHECKED),
    ("penstock.source.table.find_parts", "read_csv"): (1, _OPEN),
    ("penstock.source.tar.open_shards", "open"): (2, _OPEN),
}


def test_no_other_file_opens_a_path_for_reading() -> None:
    checked = {module: parse(path) for module, path in MODULES.items() if not module.startswith(_ZARR)}
    found = Counter((module, name) for module, tree in checked.items() for name in _reads(tree))
    assert found == {place: count for place, (count, _) in EXCEPTIONS.items()}


def _reads(tree: ast.Module) -> list[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [name for call in calls if (name := _name(call)) is not None]


def _name(call: ast.Call) -> str | None:
    """Return what a call that may open a path is called; None if it is another call, or opens for writing."""
    called = ast.unparse(call.func)
    last = called.rpartition(".")[2]
    if called in _QUALIFIED:
        return called
    if called in _NAMES or last in _METHODS:
        return last
    # `recording.open()` is a method of our own; that of a Path is given a mode.
    modes = [arg.value for arg in call.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    return called if last == "open" and modes and modes[0][:1] == "r" else None


_WRITING_METHODS = {
    *("write_text", "write_bytes", "touch", "savefig", "symlink_to", "hardlink_to", "tofile", "savez", "savetxt"),
    *("savez_compressed", "mkstemp", "mktemp", "NamedTemporaryFile", "copytree", "copyfile", "copy2"),
}
_WRITING_CALLS = {"np.save", "torch.save", "os.link", "os.symlink", "os.mkfifo", "shutil.copy", "shutil.move"}

_MEMORY = "it is given memory, not a path"
WRITING_EXCEPTIONS: dict[tuple[str, str], tuple[int, str]] = {
    ("penstock.observe.picture", "savefig"): (1, _MEMORY),
    ("penstock.files.figures", "savefig"): (1, _MEMORY),
    ("penstock.recipes.crossval.fold", "torch.save"): (1, _MEMORY),
}


def test_no_other_file_creates_files() -> None:
    found = Counter((module, name) for module, path in MODULES.items() for name in _writes(parse(path)))
    assert found == {place: count for place, (count, _) in WRITING_EXCEPTIONS.items()}


def _writes(tree: ast.Module) -> list[str]:
    found = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = ast.unparse(call.func)
        last = called.rpartition(".")[2]
        modes = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        is_mode = any(set(mode) <= set("rwaxbt+") and set(mode) & set("wax+") for mode in modes)
        if called in _WRITING_CALLS or (last == "open" and is_mode):
            found.append(called)
        elif last in _WRITING_METHODS:
            found.append(last)
    return found
