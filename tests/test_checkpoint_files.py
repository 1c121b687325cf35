"""Checkpoints on disk: whole or absent, and a clear error for what is neither."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import offload
from offload import checkpoint_files

STATE = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.arange(4000.0)}}, "epoch": 7}
ROOT = Path(__file__).parent.parent


class Crash(BaseException):
    """Not an Exception, as an interrupt is not."""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    a, b = first["state"][0], second["state"][0]
    return first["epoch"] == second["epoch"] and all(
        torch.equal(a[key], b[key]) for key in ("step", "exp_avg")
    )


# One file


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    offload.save_checkpoint({"epoch": 0}, tmp_path / "file")
    offload.save_checkpoint(STATE, tmp_path / "file")
    assert equal(offload.load_checkpoint(str(tmp_path / "file")), STATE)
    assert names(tmp_path) == {"file"}


def test_the_folder_is_made(tmp_path: Path) -> None:
    """As `save_sharded` does: a run should not end at its first save."""
    path = tmp_path / "runs" / "today" / "file"
    offload.save_checkpoint(STATE, path)
    assert equal(offload.load_checkpoint(path), STATE)


def test_permissions_are_the_usual_ones(tmp_path: Path) -> None:
    offload.save_checkpoint(STATE, tmp_path / "file")
    (tmp_path / "other").touch()
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("where", ["write", "fsync", "rename"])
def test_a_save_that_fails_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    offload.save_checkpoint(STATE, tmp_path / "file")

    def crash(*arguments: Any) -> None:
        if where == "write":
            arguments[1].write(b"half of it")
        raise Crash

    places: dict[str, tuple[Any, str]] = {
        "write": (torch, "save"),
        "fsync": (checkpoint_files.os, "fsync"),
        "rename": (checkpoint_files.Path, "replace"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*places[where], crash)
        with pytest.raises(Crash):
            offload.save_checkpoint({"epoch": 8}, tmp_path / "file")
    assert names(tmp_path) == {"file"}
    assert equal(offload.load_checkpoint(tmp_path / "file"), STATE)


def test_a_process_that_dies_in_mid_save_leaves_the_previous_one(tmp_path: Path) -> None:
    """After all bytes were written and before they got their name."""
    offload.save_checkpoint(STATE, tmp_path / "file")
    program = """
        import os, sys, torch
        from offload import checkpoint_files
        os.fsync = lambda descriptor: os._exit(9)
        checkpoint_files.save_checkpoint({"epoch": torch.ones(100)}, sys.argv[1])
    """
    died = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "file")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert died.returncode == 9
    assert equal(offload.load_checkpoint(tmp_path / "file"), STATE)
    (left,) = names(tmp_path) - {"file"}
    assert left.endswith(".writing")


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.9, -1])
def test_a_file_that_was_cut_short_is_refused(tmp_path: Path, keep: float) -> None:
    """`keep`: bytes, or a share of them, or all but one."""
    path = tmp_path / "file"
    offload.save_checkpoint(STATE, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if 0 < keep < 1 else int(keep)])
    with pytest.raises(offload.CheckpointError, match=r"file .*(cut short|cannot be read)"):
        offload.load_checkpoint(path)


def archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("notes.txt", "no tensors here")


FOREIGN: dict[str, Callable[[Path], Any]] = {
    "text": lambda path: path.write_text("lr: 0.1\n"),
    "random": lambda path: path.write_bytes(bytes(range(256)) * 40),
    "pickle": lambda path: path.write_bytes(pickle.dumps({"state": {}})),
    "another archive": archive,
    "code": lambda path: torch.save({"state": Crash}, path),
}


@pytest.mark.parametrize("write", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_file_is_refused(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    write(tmp_path / "file")
    with pytest.raises(offload.CheckpointError, match=r"file .*(is no whole checkpoint|cannot be read)"):
        offload.load_checkpoint(tmp_path / "file")


@pytest.mark.parametrize("standard", [FileNotFoundError, ValueError, offload.CheckpointError])
def test_an_absent_file_is_absent_and_the_others_are_named(tmp_path: Path, standard: type[Exception]) -> None:
    with pytest.raises(standard, match=r"no checkpoint at .*step-3: .* has nothing that was finished$"):
        offload.load_checkpoint(tmp_path / "step-3")
    offload.save_checkpoint(STATE, tmp_path / "step-2")
    (tmp_path / "step-3.abc.writing").touch()
    with pytest.raises(standard, match=r"no checkpoint at .*step-3: .* has step-2$") as raised:
        offload.load_checkpoint(tmp_path / "step-3")
    assert type(raised.value) is offload.CheckpointNotFoundError
    with pytest.raises(standard, match=r"there is no folder .*run$"):
        offload.load_checkpoint(tmp_path / "run" / "step-3")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    offload.save_checkpoint(STATE, tmp_path / "run" / "step-1")
    with pytest.raises(offload.CheckpointError, match=r"run is a folder.*name one in it \(step-1\)"):
        offload.load_checkpoint(tmp_path / "run")


# A folder, here of one process


def blank() -> dict[str, Any]:
    return {"state": {0: {"step": torch.tensor(0.0), "exp_avg": torch.zeros(4000)}}, "epoch": 0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    offload.save_sharded(STATE, tmp_path / "step-1")
    return tmp_path / "step-1"


def test_a_folder_that_is_saved_is_loaded(folder: Path) -> None:
    loaded = blank()
    offload.load_sharded(loaded, folder)
    assert equal(loaded, STATE)
    assert names(folder.parent) == {"step-1"}


def test_each_loader_names_the_other(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(offload.CheckpointError, match=r"step-1 is a folder.*load_sharded reads this one"):
        offload.load_checkpoint(folder)
    offload.save_checkpoint(STATE, tmp_path / "file")
    with pytest.raises(offload.CheckpointError, match=r"file is a file.*load_checkpoint reads files"):
        offload.load_sharded(blank(), tmp_path / "file")
    with pytest.raises(offload.CheckpointError, match=r"no checkpoint at .*step-2: .* has file, step-1"):
        offload.load_sharded(blank(), tmp_path / "step-2")


def test_a_folder_is_not_replaced(folder: Path) -> None:
    with pytest.raises(
        offload.CheckpointError, match=r"step-1 exists: give each checkpoint a name of its own"
    ):
        offload.save_sharded({"epoch": 8}, folder)
    loaded = blank()
    offload.load_sharded(loaded, folder)
    assert equal(loaded, STATE)


@pytest.mark.parametrize("where", ["data", "metadata", "rename"])
def test_a_folder_that_fails_is_absent(folder: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    places: dict[str, tuple[Any, str]] = {
        "data": (FileSystemWriter, "write_data"),
        "metadata": (FileSystemWriter, "finish"),
        "rename": (checkpoint_files.Path, "rename"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*places[where], fail)
        with pytest.raises(offload.CheckpointError, match="no space left on device"):
            offload.save_sharded({"epoch": 8}, folder.with_name("step-2"))
    assert "step-2" not in names(folder.parent)
    offload.save_sharded({"epoch": 8}, folder.with_name("step-2"))  # over what was left behind
    assert names(folder.parent) == {"step-1", "step-2"}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def data_file(folder: Path) -> Path:
    (path,) = folder.glob("*.distcp")
    return path


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "data cut short": (lambda folder: cut(data_file(folder)), r"distcp was cut short: it has \d+ bytes"),
    "data gone": (lambda folder: data_file(folder).unlink(), "distcp was cut short: it has 0 bytes"),
    "metadata gone": (lambda folder: (folder / ".metadata").unlink(), "is no whole checkpoint"),
    "metadata cut short": (lambda folder: cut(folder / ".metadata"), ".metadata cannot be read"),
    "metadata foreign": (
        lambda folder: (folder / ".metadata").write_bytes(pickle.dumps([1])),
        ".metadata cannot be read",
    ),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_folder_is_refused_before_anything_is_read(
    folder: Path, damage: Callable[[Path], Any], words: str
) -> None:
    damage(folder)
    loaded = blank()
    with pytest.raises(offload.CheckpointError, match=words):
        offload.load_sharded(loaded, folder)
    assert equal(loaded, blank())


def test_a_folder_of_something_else_is_refused(folder: Path) -> None:
    loaded = {**blank(), "schedule": torch.zeros(3)}
    with pytest.raises(offload.CheckpointError, match=r"was not loaded: .*schedule"):
        offload.load_sharded(loaded, folder)
    assert equal(loaded, blank())
