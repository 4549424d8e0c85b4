"""Cases of several ranks: real gloo processes that meet in every step."""

import json
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.campaign.peers.adapter import Adapter
from bench.campaign.peers.judge import Outcome, numbers_of, prepare, shorten

__all__ = ["RANKS"]


def set_environment(rank: int, size: int, port: int) -> None:
    """Set what torchrun sets."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")


def run_rank(adapter: Adapter, folder: Path, options: dict[str, Any]) -> None:
    """Go through an epoch; say after each step what came."""
    import torch
    import torch.distributed as dist

    rank = os.environ["RANK"]
    dist.init_process_group("gloo")
    answer: dict[str, Any] = {"items": []}

    def save() -> None:
        (folder.parent / f"next{rank}").write_text(json.dumps(answer))
        (folder.parent / f"next{rank}").replace(folder.parent / f"rank{rank}")

    save()
    try:
        for batch in adapter.loader(folder, **options):
            answer["items"].append(numbers_of(batch))
            save()
            dist.all_reduce(torch.ones(1))  # a step: all ranks take part
    except Exception as error:
        answer["error"] = shorten(error)
        save()
        return
    answer["done"] = True
    save()
    dist.barrier()  # as at the end of any epoch


def run_ranks(adapter: Adapter, folder: Path, size: int, **options: Any) -> list[dict[str, Any]]:
    """Return what each of several real gloo ranks saw until all are done, or nothing has happened for 10 seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            try:
                set_environment(rank, size, port)
                run_rank(adapter, folder, {"cache": str(folder.parent / "cache"), **options})
            finally:
                os._exit(0)
        children.append(child)
    files = [folder.parent / f"rank{rank}" for rank in range(size)]

    def answers() -> list[dict[str, Any]]:
        return [json.loads(file.read_text()) if file.exists() else {"items": []} for file in files]

    found, began = answers(), time.monotonic()
    changed = began
    while not all("done" in one or "error" in one for one in found):
        now, latest = time.monotonic(), answers()
        changed, found = (now if latest != found else changed), latest
        is_begun = any(one["items"] or "done" in one for one in found)
        if now > changed + 10 and (is_begun or now > began + 50):
            break
        time.sleep(0.05)
    for child in children:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return found


def judge_ranks(found: list[dict[str, Any]], count: int) -> Outcome:
    steps = [len(rank["items"]) for rank in found]
    errors = [rank["error"] for rank in found if "error" in rank]
    if errors:
        return "error", f"steps {steps}; {errors[0]}"
    if not all("done" in rank for rank in found):
        return "hang", f"steps {steps}: a rank waits for the others, which are done"
    items = sorted(item for rank in found for batch in rank["items"] for item in batch)
    if items == list(range(count)) and len(set(steps)) == 1:
        return "right", f"{steps} steps, each sample once"
    lost, repeated = count - len(set(items)), len(items) - len(set(items))
    return "silent", f"{steps} steps; {lost} samples lost, {repeated} repeated"


def uneven(adapter: Adapter, folder: Path) -> Outcome:
    """3 ranks over 11 samples in shards of 4."""
    prepare(adapter, folder, 11)
    return judge_ranks(run_ranks(adapter, folder, 3, count=11), 11)


def few(adapter: Adapter, folder: Path) -> Outcome:
    """3 ranks, 2 samples in one shard."""
    prepare(adapter, folder, 2)
    return judge_ranks(run_ranks(adapter, folder, 3, count=2), 2)


def validation(adapter: Adapter, folder: Path) -> Outcome:
    """2 ranks over 11 samples in order: each sample exactly once."""
    prepare(adapter, folder, 11)
    return judge_ranks(run_ranks(adapter, folder, 2, count=11, drop_last=False), 11)


RANKS: dict[int, Any] = {53: uneven, 54: few, 57: validation}
