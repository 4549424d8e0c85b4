"""Data in object storage: one endpoint for all contenders, 20 ms away, with 150 MB/s, beside what it gives at most."""

from functools import partial

from bench.remote import epochs, first_batch, streaming, waiting, zarr_windows
from bench.remote.peers import PEERS

__all__ = ["PARTS"]

PARTS = {
    "remote-stream": streaming.run,
    "remote-waiting": waiting.run,
    "remote-first": first_batch.run,
    "remote-cache": epochs.run,
    "remote-zarr": zarr_windows.run,
    **{f"remote-{peer.module}": partial(epochs.run_peer, which=peer) for peer in PEERS},
}
