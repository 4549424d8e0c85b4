"""Damage of any kind in any layout is named by every reader, with shard and item, or it makes no difference."""

import shutil
from pathlib import Path

import pytest
from penstock_test_shards import ALL, facts

from penstock import TarSource
from penstock.shard.verify import verify_shards
from tests.suites.damage import DAMAGES, LAYOUTS, READERS, write_layout


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    for layout in LAYOUTS:
        write_layout(layout, folder / layout)
    return folder


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_or_makes_no_difference(
    damage: str, layout: str, reader: str, originals: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "set"
    shutil.copytree(originals / layout, folder)
    for change in DAMAGES[damage](folder, layout):
        try:
            READERS[reader](folder, change)
        except BaseException as error:
            error.add_note(f"after this damage: {change}")
            raise
    assert facts(TarSource(folder).take(ALL)) == ALL.tolist()
    assert verify_shards(folder)[1] == []
