"""Checkpoints on disk that are whole or absent.

`save_checkpoint` and `load_checkpoint` are for one process and one file; `save_sharded` and `load_sharded` for all ranks
of a group and one folder, in the format of ``torch.distributed.checkpoint``. Each writes aside, brings what it wrote to
the disk, and renames as the last act: a crash before that leaves the previous checkpoint as it was, and behind
it something whose name ends in ``.writing`` and that may be deleted.
"""

from __future__ import annotations

import os
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from offload.config import sample
from offload.errors import CheckpointError, CheckpointNotFoundError

__all__ = ["load_checkpoint", "load_sharded", "save_checkpoint", "save_sharded"]

ASIDE = ".writing"


def save_checkpoint(state: Any, path: str | os.PathLike[str]) -> None:
    """Write `state` with ``torch.save`` to the file `path`, which is replaced as a whole or not at all.

    Its folder is made where there is none.

    Raises:
        OSError: it could not be written; what was at `path` is as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{uuid4().hex[:8]}{ASIDE}")
    try:
        with aside.open("xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def load_checkpoint(path: str | os.PathLike[str]) -> Any:
    """Read what `save_checkpoint` or ``torch.save`` wrote: tensors on the CPU, and nothing that could run code.

    Raises:
        CheckpointNotFoundError: there is nothing at `path`. It is a `FileNotFoundError` too.
        CheckpointError: it is a folder, is cut short or damaged, or no such file.
        OSError: it cannot be opened.
    """
    path = Path(path)
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder, and load_checkpoint reads a file: {_what_is_in(path)}")
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"there is no checkpoint at {path}: {_what_is_near(path)}") from error
    with file:
        if not zipfile.is_zipfile(file):
            raise CheckpointError(
                f"{path} ({path.stat().st_size} bytes) is no whole checkpoint: it was cut short, or "
                "torch.save did not write it; load the one before it"
            )
        file.seek(0)
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{path} cannot be read as a checkpoint, which has tensors and plain values and is whole: {error}"
            ) from error


def save_sharded(
    state: dict[str, Any],
    folder: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write `state` with ``torch.distributed.checkpoint`` to the new folder `folder`. Called by all ranks of the group.

    Args:
        state: the same keys on all ranks, DTensors for what is sharded; see docs/checkpoints.md.
        folder: on a file system that all ranks share; it must not exist yet: folders cannot be replaced in one act.

    Raises:
        CheckpointError: some rank failed, or `folder` exists. On every rank; `folder` is not there then.
    """
    folder = Path(folder)
    aside = folder.with_name(folder.name + ASIDE)
    _together(lambda: _make_way(folder, aside), process_group)
    with _failures_of(f"{folder} was not saved"):
        save(state, checkpoint_id=aside, process_group=process_group)
    _together(lambda: _publish(aside, folder), process_group)


def load_sharded(
    state: dict[str, Any],
    folder: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Read a folder of ``torch.distributed.checkpoint`` into the tensors of `state`, resharded as these are.

    Called by all ranks of the group. Files are checked for their length before anything is read.

    Raises:
        CheckpointError: there is no whole checkpoint, or it lacks a key of `state`. On every rank.
    """
    folder = Path(folder)
    _together(lambda: _check_folder(folder), process_group)
    with _failures_of(f"{folder} was not loaded"):
        load(state, checkpoint_id=folder, process_group=process_group)


def _make_way(folder: Path, aside: Path) -> None:
    if folder.exists():
        raise CheckpointError(f"{folder} exists: give each checkpoint a name of its own, such as step-000100")
    shutil.rmtree(aside, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)


def _publish(aside: Path, folder: Path) -> None:
    _sync_folder(aside)
    aside.rename(folder)
    _sync_folder(folder.parent)


def _what_is_in(folder: Path) -> str:
    """Of a folder that was taken for a file."""
    if (folder / ".metadata").is_file():
        return "load_sharded reads this one"
    return f"name one in it ({_listed(folder)})"


def _what_is_near(path: Path) -> str:
    """Of a path with nothing at it."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    return f"{path.parent.resolve()} has {_listed(path.parent)}"


def _listed(folder: Path) -> str:
    """What was saved to `folder` and is not hidden."""
    try:
        names = sorted(each.name for each in folder.iterdir() if not each.name.startswith("."))
    except OSError as error:  # of no interest beside what it is asked for
        return f"what cannot be listed, {error.strerror}"
    whole = [name for name in names if not name.endswith(ASIDE)]
    return sample(whole) if whole else "nothing that was finished"


def _check_folder(folder: Path) -> None:
    """Whether all bytes are there that the metadata speaks of."""
    if folder.is_file():
        raise CheckpointError(
            f"{folder} is a file, and load_sharded reads a folder: load_checkpoint reads files"
        )
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint at {folder}: {_what_is_near(folder)}")
    if not (folder / ".metadata").is_file():
        raise CheckpointError(
            f"{folder} is no whole checkpoint of torch.distributed.checkpoint: it has no .metadata, which is written "
            "last; load the one before it"
        )
    try:
        metadata = FileSystemReader(folder).read_metadata()
        places = list((metadata.storage_data or {}).values())
        needed: dict[str, int] = {}
        for place in places:
            name, end = place.relative_path, place.offset + place.length
            needed[name] = max(needed.get(name, 0), end)
    except Exception as error:
        raise CheckpointError(
            f"{folder}: its .metadata cannot be read ({type(error).__name__}: {error})"
        ) from error
    for name, end in needed.items():
        file = folder / name
        size = file.stat().st_size if file.is_file() else 0
        if size < end:
            raise CheckpointError(f"{file} was cut short: it has {size} bytes, the metadata speaks of {end}")


def _together(act: Callable[[], None], process_group: dist.ProcessGroup | None) -> None:
    """Rank 0 of the group acts; where it fails, all raise."""
    failure: Exception | None = None
    distributed = dist.is_available() and dist.is_initialized()
    if not distributed or dist.get_rank(process_group) == 0:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - the others wait to be told
            failure = error
    message = [None if failure is None else str(failure)]
    if distributed:
        root = 0 if process_group is None else dist.get_global_rank(process_group, 0)
        dist.broadcast_object_list(message, src=root, group=process_group)
    if message[0] is not None:
        raise CheckpointError(message[0]) from failure


@contextmanager
def _failures_of(what: str) -> Iterator[None]:
    """DCP's own error is no `Exception`; it holds those of all ranks."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except CheckpointException as error:
        failures = error.failures.items()
        reasons = "; ".join(
            f"rank {rank}: {type(reason).__name__}: {reason}" for rank, (reason, _) in failures
        )
        raise CheckpointError(f"{what}: {reasons}") from error
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error


def _sync_folder(folder: Path) -> None:
    """Make a rename last. Elsewhere than on POSIX folders cannot be opened."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
