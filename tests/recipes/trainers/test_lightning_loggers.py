"""A watch inside a Lightning training logs to the trainer's own loggers."""

import csv
from pathlib import Path

import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from penstock import watch


def test_the_loggers_of_lightning_receive_the_scalars(tmp_path: Path) -> None:
    table, events = CSVLogger(tmp_path, flush_logs_every_n_steps=1), TensorBoardLogger(tmp_path)
    for logger in (table, events):
        with watch([torch.zeros(8, 2)] * 5, log=logger, log_every_steps=2, warmup=0, show=False) as watched:
            for _ in watched:
                pass
        logger.finalize("success")
    with (Path(table.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [2, 4, 5]
    found = EventAccumulator(events.log_dir).Reload()
    assert [event.step for event in found.Scalars("data/wait_fraction")] == [4, 5]
    assert set(found.Tags()["scalars"]) == set(rows[0]) - {"step"}
