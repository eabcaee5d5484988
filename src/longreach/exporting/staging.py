"""A folder that appears whole or not at all: written beside its place, moved there in one step.

Whatever ends the export (an error, Ctrl-C, a full disk), the target keeps what it held before. A process that is killed
leaves a folder named ``.NAME.partial-…``, which the next export to the same place removes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import ExportError, MismatchError

BAD_SUFFIX = ".bad"
REPORT = "verification.json"  # in every folder that an export wrote
_PARTIAL = "partial-"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fs.h


@contextmanager
def staged(target: Path, *, force: bool, needed_bytes: int = 0, single_file: bool = False) -> Iterator[Path]:
    """Yield an empty folder to write into; afterwards it is (or its one file of the target's suffix is) `target`.

    Args:
        target: a folder or, with `single_file`, a file.
        force: replace what is there. Without it an existing target is an `ExportError`.
        needed_bytes: what will be written at the most; checked against the free space before anything is written.
        single_file: move only the file with the target's suffix into place.

    Raises:
        ExportError: the target exists, its folder can't be written, or the disk is or becomes full.
        MismatchError: passed on from the body; what was written is then kept as ``target.bad``.
    """
    parent = target.absolute().parent
    _check_target(target, force=force, single_file=single_file)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for rest in parent.glob(f".{target.name}.{_PARTIAL}*"):
            if not _alive(rest):
                shutil.rmtree(rest, ignore_errors=True)
        _check_space(parent, needed_bytes)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.{_PARTIAL}{os.getpid()}-", dir=parent))
        folder.chmod(0o755)
    except OSError as error:
        raise ExportError(f"path={str(target)!r}: can't write there ({error.strerror or error})") from error
    try:
        yield folder
        _sync(folder)
        _place(_only_file(folder, target.suffix) if single_file else folder, target)
    except MismatchError:
        bad = target.with_name(target.name + BAD_SUFFIX)
        shutil.rmtree(bad, ignore_errors=True)
        os.rename(folder, bad)
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ExportError(f"path={str(target)!r}: the disk became full; nothing was left there") from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_target(target: Path, *, force: bool, single_file: bool) -> None:
    if not target.exists():
        return
    if not force:
        raise ExportError(
            f"path={str(target)!r} exists already; choose another path, or replace it with force=True (--force)"
        )
    if target.is_dir() == single_file:
        kind, wanted = ("folder", "file") if single_file else ("file", "folder")
        raise ExportError(f"path={str(target)!r} is a {kind} and would be replaced by a {wanted}; choose another path")
    if target.is_dir() and any(target.iterdir()) and not (target / REPORT).is_file():
        raise ExportError(
            f"path={str(target)!r} was not written by an export (it holds no {REPORT}), so it isn't replaced; choose another "
            "path or remove it yourself"
        )


def _alive(partial: Path) -> bool:
    """Whether the process that writes this folder still runs."""
    number = partial.name.rpartition(_PARTIAL)[2].partition("-")[0]
    try:
        os.kill(int(number), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ExportError(
            f"the export needs about {needed / 1e9:.2f} GB in {str(folder)!r}, which has {free / 1e9:.2f} GB free"
        )


def _only_file(folder: Path, suffix: str) -> Path:
    found = sorted(folder.glob(f"*{suffix}"))
    if len(found) != 1:
        raise ExportError(f"expected one {suffix} file, got {[p.name for p in found]}")
    return found[0]


def _sync(folder: Path) -> None:
    """On disk before it is visible: a crash of the machine must not leave a whole-looking folder with holes."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _place(made: Path, target: Path) -> None:
    if made.is_file() or not target.exists():
        os.replace(made, target)
    elif _exchange(made, target):
        shutil.rmtree(made)  # now the old one
    else:  # a file system without an exchange: for one instant there is no target, never half of one
        old = Path(
            tempfile.mkdtemp(prefix=f".{target.name}.{_PARTIAL}{os.getpid()}-old-", dir=target.absolute().parent)
        )
        os.rename(target, old / target.name)
        os.rename(made, target)
        shutil.rmtree(old)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two folders in one step (Linux renameat2). False where the system can't."""
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    return renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0
