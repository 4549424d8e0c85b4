"""Accelerate: loaders that keep their own order and position, on the accelerator's device, in its checkpoints."""

from collections.abc import Iterator
from typing import Any

from penstock.core.errors import LoaderError, MissingDependency
from penstock.recipes.trainers.feed import Feed

try:
    from accelerate import Accelerator  # type: ignore[import-untyped]  # accelerate has no types
    from accelerate.data_loader import DataLoaderStateMixin  # type: ignore[import-untyped]
    from accelerate.state import GradientState  # type: ignore[import-untyped]
    from accelerate.utils import send_to_device  # type: ignore[import-untyped]
except ImportError as error:
    raise MissingDependency("accelerate", "accelerate", "prepare_loader") from error

__all__ = ["AcceleratedFeed", "prepare_loader"]


class AcceleratedFeed(Feed, DataLoaderStateMixin):  # type: ignore[misc]
    """A loader for an `Accelerator`; made by `prepare_loader`."""

    def __init__(self, loader: Any, accelerator: Accelerator) -> None:
        super().__init__(loader, accelerator.num_processes)
        self._device = accelerator.device
        self.gradient_state = GradientState()

    def _iterate(self) -> Iterator[Any]:
        self.reset()
        self.gradient_state._add_dataloader(self)
        try:
            for batch in super()._iterate():
                # Accumulated gradients are applied at the last batch.
                self.end_of_dataloader = self.delivered == len(self.loader)
                yield send_to_device(batch, self._device)
        finally:
            self.end()


def prepare_loader(accelerator: Accelerator, loader: Any) -> AcceleratedFeed:
    """Prepare a loader for an accelerator, in place of `accelerator.prepare(loader)`, which knows nothing of positions.

    Batches arrive on the accelerator's device. `accelerator.save_state()` saves the position of the loader, and
    `accelerator.load_state()` resumes at the next batch. Accumulated gradients are applied at the end of an epoch or
    chunk.

    Parameters
    ----------
    accelerator
        The accelerator that runs the training.
    loader
        A `Loader`, or a `ChunkedDataLoader` with chunks, made after the ranks have started.
    """
    if not isinstance(accelerator, Accelerator):
        raise LoaderError(f"accelerator must be an accelerate.Accelerator, got {type(accelerator).__name__}.")
    feed = AcceleratedFeed(loader, accelerator)
    accelerator.register_for_checkpointing(feed)
    return feed
