"""Writes, reads, trains and converts; prints digests of what came out. Started by `test_elsewhere.py`."""

import hashlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import penstock as ps
from penstock.convert import engines
from penstock.source import native


def digest(*arrays: Any) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


def train(loader: ps.Loader) -> list[Any]:
    """Return all batches, and the weights of a small model that was trained on them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    seen = []
    for batch in loader:
        loss = ((model(batch["x"].float()) - batch["label"][:, None]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += [batch["x"].numpy(), batch["label"].numpy()]
    return [*seen, *(weights.detach().numpy() for weights in model.parameters())]


def main() -> None:
    os.chdir(sys.argv[1])
    data = {"x": np.arange(240, dtype=np.int32).reshape(40, 6), "label": np.arange(40, dtype=np.float32)}
    found: dict[str, Any] = {"native": native.is_compiled(), "memfd": hasattr(os, "memfd_create")}
    ps.create_shards_from_arrays("plain", data, shard_size=7)
    ps.create_shards_from_arrays("packed", data, shard_size=7, compression="gz")
    np.save("rows.npy", data["x"])
    runs = {
        "inline": (0, ps.RunOptions()),
        "threads": (2, ps.RunOptions(executor="threads")),
        "processes": (2, ps.RunOptions(executor="processes")),
    }
    for name in ("plain", "packed"):
        for run, (workers, options) in runs.items():
            source = ps.TarSource(name)
            plan = ps.Plan(source.index, batch_size=8, order=ps.WindowShuffle(3), seed=3)
            with ps.Loader(source, plan, num_workers=workers, options=options) as loader:
                found[f"{name}, {run}"] = digest(*train(loader))
    rows = ps.ArraySource({"x": np.load("rows.npy", mmap_mode="r")})
    found["rows"] = digest(rows.take(np.arange(40)[::-3])["x"])
    if not found["memfd"]:
        engines.sys = SimpleNamespace(platform="darwin")  # type: ignore[attr-defined]
    ps.convert_to_shards("plain", "converted", workers=2, show_progress=False)
    found["converted"] = digest(*ps.TarSource("converted", fields=["x"]).read(ps.Span(0, 40)).values())
    found["files"] = sorted(path.name for path in Path("converted").glob("*.tar"))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
