"""The protocol of publication, killed at every step: the old files or the new ones, and resuming completes them.

A small writer stands for all of them. It publishes files and a commit that lists them, as datasets of shards do, or one
folder, as images do. To kill it, the n-th call that changes a file raises, and so does every call after it, so that
nothing is cleaned up.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from penstock.core.errors import OptionError, WriteError
from penstock.files.durable import write_aside
from penstock.files.staging import Staging, refuse_links, remove_staging

CHANGES = ("open", "write", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir")
KINDS = ("files", "folder")
VERSIONS = {"old": ("a", "b", "c"), "new": ("b", "c", "d", "e"), "other": ("a", "c", "e")}


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Killed(BaseException):
    """The process has died."""


@contextmanager
def killed_at(last: int) -> Iterator[Callable[[], int]]:
    """Die at the change number `last`; 0: never. Yields a function that returns the number of changes."""
    count, lock = 0, Lock()

    def count_calls(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            with lock:
                count += 1
                if last and count >= last:
                    raise Killed
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, count_calls(getattr(os, name)))
        yield lambda: count


class Writer:
    """Writes one of the versions into a folder."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        target, commit = ("image", "image") if kind == "folder" else ("commit.json", "commit.json")
        self.staging = Staging(folder / ".writing", folder / target, commit)

    def write(self, version: str, *, resume: bool = False) -> None:
        staging = self.staging
        if resume:
            if self.kind == "files" and staging.commit.exists():
                self._publish()
            staging.clean_up()
            if not staging.folder.exists() and self.read() == version:
                return
            if staging.options not in (None, version):
                raise OptionError(f"begun as {staging.options}")
        else:
            staging.clear()
        staging.begin(version)
        place = staging.commit if self.kind == "folder" else staging.folder
        place.mkdir(exist_ok=True)
        for name in VERSIONS[version]:
            if not (place / name).exists():
                write_aside(place / name, f"{name} {version}".encode(), lasting=False, folder=staging.folder)
        if self.kind == "folder":
            staging.prepare(place.iterdir())
        else:
            names = VERSIONS[version]
            content = json.dumps({"version": version, "names": names}).encode()
            staging.prepare([place / name for name in names], content)
        self._publish()

    def _publish(self) -> None:
        if self.kind == "folder":
            self.staging.publish()
            return
        names = json.loads(self.staging.commit.read_bytes())["names"]
        before = [path for path in (self.staging.target, self.staging.replaced) if path.exists()]
        stale = {name for path in before for name in json.loads(path.read_bytes())["names"]} - set(names)
        self.staging.publish(names, sorted(stale))

    def read(self) -> str | None:
        """Return which version a reader finds; it must be whole. None if there is none."""
        if not self.staging.target.exists():
            return None
        if self.kind == "folder":
            found = {path.name: path.read_text() for path in self.staging.target.iterdir()}
        else:
            listed = json.loads(self.staging.target.read_bytes())["names"]
            found = {name: (self.folder / name).read_text() for name in listed}
        (version,) = {text.split()[1] for text in found.values()}
        assert found == {name: f"{name} {version}" for name in VERSIONS[version]}
        return version


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Case:
    """Folders with the old version, or none, in which the new version is written."""

    def __init__(self, folder: Path, kind: str, before: str) -> None:
        self._folder, self.kind, self.before, self._count = folder, kind, before, 0
        whole = self.begin()
        with killed_at(0) as count:
            whole.write("new")
            self.ticks = count()
        self.whole = tree(whole.folder)

    def begin(self) -> Writer:
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        writer = Writer(folder, self.kind)
        if self.before:
            writer.write(self.before)
        return writer

    def killed(self, at: int) -> Writer:
        """Return a writer that was killed."""
        writer = self.begin()
        with pytest.raises(Killed), killed_at(at):
            writer.write("new")
        return writer


@pytest.fixture(params=[(kind, before) for kind in KINDS for before in ("", "old")], ids=str)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return Case(tmp_path, *request.param)


def test_killed_at_any_step_a_reader_finds_the_old_or_the_new_and_resuming_completes_it(case: Case) -> None:
    assert case.ticks > 20
    seen = []
    for at in range(1, case.ticks + 1):
        writer = case.killed(at)
        seen.append(writer.read())
        assert seen[-1] in (None, case.before or None, "new"), f"killed at {at}"
        writer.write("new", resume=True)
        assert tree(writer.folder) == case.whole, f"killed at {at}"
    # Old, then for a moment none, then new: it never goes back.
    stages = [case.before or None, None, "new"] if case.before else [None, "new"]
    assert [version for n, version in enumerate(seen) if n == 0 or seen[n - 1] != version] == stages


def test_what_is_only_begun_or_published_can_be_removed_by_hand(case: Case) -> None:
    seen = set()
    for at in range(1, case.ticks + 1):
        writer = case.killed(at)
        progress, version = writer.staging.progress, writer.read()
        seen.add(progress)
        if progress == "publishing":
            continue  # it may hold the only copy of the old version
        before = tree(writer.folder)
        for name in (".writing", ".written"):
            shutil.rmtree(writer.folder / name, ignore_errors=True)
        assert version == ("new" if progress == "published" else writer.read())
        assert writer.read() == version, f"killed at {at}, {progress}"
        rest = {name for name in tree(writer.folder) if name not in case.whole}
        old = {name for name in before if not name.startswith(".")} if version == "old" else set()
        assert rest <= old, f"killed at {at}, {progress}"
    assert seen == {"none", "begun", "publishing", "published"}


def test_killed_again_while_it_resumes_it_is_completed_all_the_same(case: Case) -> None:
    moments = random.Random("again")
    for at in range(1, case.ticks + 1):
        writer = case.killed(at)
        for _ in range(3):
            try:
                with killed_at(moments.randrange(1, case.ticks)):
                    writer.write("new", resume=True)
            except Killed:
                assert writer.read() in (None, case.before or None, "new")
        writer.write("new", resume=True)
        assert tree(writer.folder) == case.whole, f"killed at {at}"


def test_killed_while_it_starts_over_nothing_of_the_discarded_write_is_published(case: Case) -> None:
    for at in range(1, case.ticks + 1):
        begun = case.killed(at)
        for again in range(1 + at % 3, 20, 3):
            folder = begun.folder.with_name(f"{begun.folder.name}-{again}")
            shutil.copytree(begun.folder, folder)
            writer = Writer(folder, case.kind)
            with killed_at(again):
                try:
                    writer.write("other")
                except Killed:
                    assert writer.read() in (None, case.before or None, "new")
            try:
                writer.write("other", resume=True)
            except OptionError:  # begun as "new"; it resumes as that, or starts over
                writer.write("other")
            if writer.read() != "other":  # what was complete when it was to be discarded is published
                assert writer.read() == "new"
                writer.write("other")
            assert writer.read() == "other", f"killed at {at}, then at {again}"
            assert not writer.staging.folder.exists()


@pytest.mark.parametrize("before", ["", "old"])
@pytest.mark.parametrize("name", VERSIONS["new"])
def test_a_file_that_somebody_removed_before_it_was_published_stops_the_publication(
    name: str, before: str, tmp_path: Path
) -> None:
    case = Case(tmp_path, "files", before)
    killed = [writer for at in range(1, case.ticks + 1) if (writer := case.killed(at)).staging.commit.exists()]
    prepared = [writer for writer in killed if (writer.staging.folder / name).exists()]
    # The last one that is killed has moved the old version away; only what that one did not have is missed then.
    for writer in (prepared[0], prepared[-1]) if name in "de" else prepared[:1]:
        (writer.staging.folder / name).unlink()
        found = writer.read()
        with pytest.raises(WriteError, match=rf"writing/{name} was removed by somebody .*Start over with resume=False"):
            writer.write("new", resume=True)
        assert writer.read() == found
        writer.write("new")
        assert writer.read() == "new"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", ["fsync", "replace", "mkdir"])
def test_errors_of_the_file_system_name_the_place_and_resuming_completes_it(
    kind: str, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    writer = Writer(tmp_path, kind)
    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        with pytest.raises(WriteError, match=rf"Could not write {tmp_path}.*: \[Errno 28\] No space left on device"):
            writer.write("new")
    assert writer.read() is None
    writer.write("new", resume=True)
    assert writer.read() == "new"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [".writing", ".written"])
def test_a_staging_folder_that_is_a_link_is_refused_and_what_it_leads_to_stays(
    name: str, kind: str, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    for inside in ("options.json", "finished.json", "commit.json", "a"):
        (victim / inside).write_text("mine")
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / name).symlink_to(victim)
    before = tree(tmp_path)
    with pytest.raises(WriteError, match=rf"place/{name} must be a folder of Penstock.*Remove the link"):
        Writer(tmp_path / "place", kind)
    assert tree(tmp_path) == before


def test_links_are_refused_wherever_they_lead(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder").mkdir()
    refuse_links(tmp_path / "folder", tmp_path / "missing")
    with pytest.raises(WriteError, match="dangling"):
        refuse_links(tmp_path / "folder", tmp_path / "dangling")


def test_beginning_removes_temporary_files_of_killed_writers_and_keeps_what_is_finished(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "files")
    writer.staging.begin("new", {"skipped.json": b"[]"})
    for name in ("b", ".c.0123.aside", "c.host-1.part"):
        (writer.staging.folder / name).write_text("b new")
    writer.staging.begin("new")
    found = {name: content.decode() for name, content in tree(writer.staging.folder).items()}
    assert found == {"options.json": "new", "skipped.json": "[]", "b": "b new"}


def test_files_to_keep_survive_clearing(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "files")
    writer.staging.clear()  # there is nothing yet
    writer.staging.begin("new", {"stale.json": b"[]", "other.json": b"[]"})
    writer.staging.clear(keep=("stale.json",))
    assert tree(tmp_path) == {".writing/stale.json": b"[]"}


def test_a_staging_folder_is_removed_together_with_what_an_earlier_removal_left(tmp_path: Path) -> None:
    staging, aside = tmp_path / ".writing", tmp_path / ".written"
    for folder in (staging, aside):
        folder.mkdir()
        (folder / "shard.tar").write_bytes(b"1")
    remove_staging(staging, aside)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        remove_staging(staging, aside)
