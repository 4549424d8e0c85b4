"""States that the code of d511aa8 saved send the loaders of today to the same place: the same items follow, in order.

See `test_written_before.py`.
"""

import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import parts_compatibility as parts
import parts_states
import pytest
from parts_compatibility import WRITTEN

import penstock as ps

pytestmark = pytest.mark.filterwarnings("ignore:.*penstock:DeprecationWarning")

STATES: dict[str, Any] = {
    name: entry
    for group in ("sources", "plans", "recipes")
    for name, entry in json.loads((WRITTEN / f"states/{group}.json").read_bytes()).items()
}


def stored(name: str) -> Any:
    """Return what a JSON file says."""
    return json.loads((WRITTEN / name).read_bytes())


def test_every_saved_state_is_of_a_loader_that_is_tried() -> None:
    assert set(STATES) == set(parts_states.cases(WRITTEN))


@pytest.mark.parametrize("name", list(STATES))
def test_a_loader_goes_on_from_a_saved_state(name: str) -> None:
    case = parts_states.cases(WRITTEN)[name]
    loader = (case.again or case.make)()
    parts_states.restore(loader, STATES[name]["state"])
    rest = list(islice(case.stream(loader), case.after))
    parts_states.close(loader)
    assert json.loads(json.dumps(rest)) == STATES[name]["rest"]


@pytest.mark.parametrize("name", [name for name in STATES if name not in parts_states.CHANGED])
def test_a_loader_of_today_saves_the_same_state(name: str) -> None:
    case = parts_states.cases(WRITTEN)[name]
    loader = case.make()
    stream = case.stream(loader)
    for _ in islice(stream, case.before):
        pass
    state = json.loads(json.dumps(parts_states.state_of(loader)))
    stream.close()
    parts_states.close(loader)
    assert state == STATES[name]["state"]


def test_a_plan_that_names_no_tail_goes_on_from_a_state_of_one_that_dropped_it() -> None:
    saved = STATES["other batch size"]
    source = ps.ArraySource({"x": parts.numbered(37)})
    with ps.Loader(source, ps.Plan(source.index, ps.Shuffle(), batch_size=5, seed=4)) as loader:
        loader.load_state_dict(saved["state"])
        rest = json.loads(json.dumps(list(islice(parts_states.batches(loader), len(saved["rest"])))))
    assert saved["state"]["plan"]["tail"] == "drop"
    assert rest == saved["rest"]


def test_a_loader_reads_the_file_it_had_saved(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint.json"
    shutil.copy(WRITTEN / "checkpoint.json", checkpoint)
    loader = parts.resumable(WRITTEN, checkpoint)
    rest = [sample["number"] for sample in islice(parts.batches(loader), 9)]
    loader.close()
    assert rest == stored("checkpoint_rest.json")["rest"]


def test_a_checkpoint_of_lightning_goes_on_at_the_next_batch() -> None:
    found, rest = parts.fit(WRITTEN / "lightning.ckpt"), stored("lightning_rest.json")
    assert found.seen == rest["seen"]
    assert found.weight == pytest.approx(rest["weight"], rel=1e-5)


def test_a_state_of_accelerate_goes_on_at_the_next_batch() -> None:
    assert parts.accelerated(WRITTEN / "accelerate", save=False) == stored("accelerate_rest.json")["rest"]
