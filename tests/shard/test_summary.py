"""Facts about a dataset from its manifest, and shards that are missing or have changed size."""

from pathlib import Path

from penstock.shard.summary import find_problems, summarize
from tests.shard.samples import write


def test_a_summary_has_totals_fields_and_metadata(tmp_path: Path) -> None:
    manifest = write(tmp_path, metadata={"lab": "left"})
    assert summarize(manifest) == {
        "total_samples": 7,
        "total_shards": 3,
        "shard_size": 3,
        "compression": "none",
        "modalities": ["x", "note"],
        "fields": {
            "x": {"dtype": "int32", "shape": [2], "stored_as": "npy"},
            "note": {"dtype": None, "shape": None, "stored_as": "txt"},
            "metadata": {"dtype": None, "shape": None, "stored_as": "json"},
        },
        "total_bytes": sum(path.stat().st_size for path in tmp_path.glob("*.tar")),
        "metadata": {"lab": "left"},
        "fingerprint": manifest.fingerprint,
    }


def test_missing_shards_and_shards_of_another_size_are_problems(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    assert find_problems(manifest) == []
    (tmp_path / "shard_000000.tar").unlink()
    (tmp_path / "shard_000002.tar").write_bytes(b"short")
    size = manifest.shards[2].stored_bytes
    assert find_problems(manifest) == [
        "shard_000000.tar is missing",
        f"shard_000002.tar has 5 bytes, but {size} were written",
    ]
