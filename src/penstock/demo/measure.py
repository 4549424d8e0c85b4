"""How fast the demo reads all fields, and its report: as a process of its own does it."""

from penstock.demo.task import ALL_FIELDS, Task, source_and_plan
from penstock.feed.loader import Loader
from penstock.observe.watcher import watch
from penstock.report.build import write_report
from penstock.run.options import RunOptions

__all__ = ["measure"]


def measure(task: Task) -> None:
    """Read all fields as fast as they come, and write the report of the data set and of the undisturbed training."""
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
