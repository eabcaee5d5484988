"""A target appears whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from longreach.exporting import staging
from longreach.exporting.errors import ExportError, MismatchError
from longreach.exporting.staging import staged


def write(folder: Path, text: str = "new") -> None:
    (folder / "config.json").write_text(text)
    (folder / "verification.json").write_text("{}")


def test_appears_when_whole(tmp_path: Path) -> None:
    with staged(tmp_path / "out", force=False) as folder:
        write(folder)
        assert not (tmp_path / "out").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x")])
def test_interrupted_leaves_nothing(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)), staged(tmp_path / "out", force=False) as folder:
        write(folder)
        raise error
    assert not list(tmp_path.iterdir())


def test_existing_target(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", "old")
    with pytest.raises(ExportError, match=r"exists already.*--force"), staged(tmp_path / "out", force=False):
        pass
    with staged(tmp_path / "out", force=True) as folder:
        write(folder)
        assert (tmp_path / "out" / "config.json").read_text() == "old"
    assert (tmp_path / "out" / "config.json").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("exchange", [True, False])
def test_force_that_fails_keeps_the_old(exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchange:
        monkeypatch.setattr(staging, "_exchange", lambda a, b: False)
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", "old")
    with pytest.raises(ValueError), staged(tmp_path / "out", force=True) as folder:
        write(folder)
        raise ValueError
    assert (tmp_path / "out" / "config.json").read_text() == "old"
    with staged(tmp_path / "out", force=True) as folder:
        write(folder)
    assert (tmp_path / "out" / "config.json").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_force_removes_no_one_elses_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ExportError, match="was not written by an export"), staged(tmp_path, force=True):
        pass


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(ExportError, match=r"needs about 9000\d+\.\d+ GB"),
        staged(tmp_path / "o", force=False, needed_bytes=9 * 10**15),
    ):
        pass
    with pytest.raises(ExportError, match="the disk became full"), staged(tmp_path / "o", force=False) as folder:
        write(folder)
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_mismatch_is_kept_as_bad(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with pytest.raises(MismatchError), staged(tmp_path / "out", force=False) as folder:
            write(folder, text)
            raise MismatchError("x")
    assert [p.name for p in tmp_path.iterdir()] == ["out.bad"]
    assert (tmp_path / "out.bad" / "config.json").read_text() == "second"


def test_rests_of_a_killed_export_are_removed(tmp_path: Path) -> None:
    dead, alive = tmp_path / ".out.partial-999999999-x", tmp_path / f".out.partial-{os.getppid()}-y"
    dead.mkdir()
    alive.mkdir()
    with staged(tmp_path / "out", force=False) as folder:
        write(folder)
    assert not dead.exists() and alive.exists()


def test_single_file(tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    for text in ("one", "two"):
        with staged(target, force=text == "two", single_file=True) as folder:
            (folder / "x.gguf").write_text(text)
            write(folder)
    assert target.read_text() == "two" and [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="can't write there"), staged(tmp_path / "file" / "out", force=False):
        pass
