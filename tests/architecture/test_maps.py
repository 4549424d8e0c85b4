"""The maps of the rooms, and of a batch's way, name what is there."""

import re

import pytest
from penstock_tree import MODULES, ROOT, SRC, imports, room

_PACKAGE = SRC / "penstock"
_ARCHITECTURE = ROOT / "docs" / "explanation" / "architecture.md"
ROOMS = sorted({room(module).split(".")[0] for module in MODULES} - {"", "__main__"})
_FILE = re.compile(r"(?<![\w/*])([a-z_]+(?:/[a-z_]+)*\.(?:pyi|py|c))\b")
_FOLDER = re.compile(r"(?<![\w/.*])([a-z_]+)/(?![\w])")


@pytest.mark.parametrize("name", ROOMS)
def test_the_map_of_a_room_names_all_that_is_in_it_and_nothing_that_is_not(name: str) -> None:
    folder = _PACKAGE / name
    text = (folder / "README.md").read_text()
    drawing = "".join(re.findall(r"```text\n(.*?)```", text, re.S))
    here = {path.name for path in folder.glob("[!_]*.py*") if path.suffix in (".py", ".pyi")}
    here |= {path.name for path in folder.glob("*.c")}
    assert here - set(_FILE.findall(drawing)) == set(), "not on the map"
    folders = {path.parent.name for path in folder.glob("*/__init__.py")}
    assert folders - set(_FOLDER.findall(text)) == set(), "not on the map"
    wrong = [
        file for file in _FILE.findall(text) if not any((base / file).exists() for base in (folder, _PACKAGE, ROOT))
    ]
    assert wrong == [], "on the map, but not there"


@pytest.mark.parametrize("name", ROOMS)
def test_the_map_of_a_room_says_what_passes_and_where_to_add(name: str) -> None:
    text = (_PACKAGE / name / "README.md").read_text()
    assert text.startswith(f"# {name}: ")
    assert "**In:**" in text
    assert "**Out:**" in text
    assert "**Add" in text


def test_the_drawings_of_the_architecture_name_files_that_are_there() -> None:
    drawings = re.findall(r"```text\n(.*?)```", _ARCHITECTURE.read_text(), re.S)
    assert len(drawings) == 3
    files = [file for drawing in drawings for file in _FILE.findall(drawing)]
    assert files
    assert [file for file in files if not (_PACKAGE / file).exists()] == []


def test_the_arrows_of_the_architecture_are_imports_of_the_code() -> None:
    text = _ARCHITECTURE.read_text()
    rows = re.findall(r"^\| `([\w/]+\.py)` \| `([\w/]+\.py)` \| (imports|is handed) \|", text, re.M)
    assert len(rows) > 20
    wrong = []
    for left, right, arrow in rows:
        importer, imported = (f"penstock.{file.removesuffix('.py').replace('/', '.')}" for file in (left, right))
        if {importer, imported} - MODULES.keys():
            wrong.append(f"{left} or {right} is not there")
        elif (imported in imports(importer)) != (arrow == "imports"):
            wrong.append(f"{left} {arrow} {right}")
    assert wrong == []


def test_every_arrow_of_the_architecture_is_in_its_drawing() -> None:
    for part in re.split(r"^## ", _ARCHITECTURE.read_text(), flags=re.M)[1:]:
        drawn = set(_FILE.findall("".join(re.findall(r"```text\n(.*?)```", part, re.S))))
        named = {file for row in re.findall(r"^\| `([\w/]+\.py)` \| `([\w/]+\.py)` \|", part, re.M) for file in row}
        assert named == drawn, part.split("\n")[0]
