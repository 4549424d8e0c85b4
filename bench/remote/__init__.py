"""Data in object storage: one endpoint for all contenders, 20 ms away, with 150 MB/s, beside what it gives at most."""

from bench.remote import epochs, first_batch, streaming, waiting, zarr_windows

__all__ = ["PARTS"]

PARTS = {
    "remote-stream": streaming.run,
    "remote-waiting": waiting.run,
    "remote-first": first_batch.run,
    "remote-cache": epochs.run,
    "remote-zarr": zarr_windows.run,
    "remote-peers": epochs.run_peers,
}
