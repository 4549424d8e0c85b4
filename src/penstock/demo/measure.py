"""The measuring task of the demo: the speed of the loader alone, and the report."""

from penstock.demo.task import ALL_FIELDS, Task, source_and_plan
from penstock.feed.loader import Loader
from penstock.observe.watcher import watch
from penstock.report.build import write_report
from penstock.run.options import RunOptions

__all__ = ["measure"]


def measure(task: Task) -> None:
    """Read all fields as fast as possible, and write the report on the dataset and the uninterrupted training."""
    source, plan = source_and_plan(task, ALL_FIELDS)
    with (
        Loader(source, plan, num_workers=task.workers, options=RunOptions("threads")) as loader,
        watch(loader, show=False) as watched,
    ):
        for _ in watched:
            pass
    run = task.path("run.json").with_name(f"{task.resume}.run.json")
    write_report(task.page, dataset=task.damaged, run=run, title="The Penstock demo")
    task.write_report({"watched": watched.to_dict()})
