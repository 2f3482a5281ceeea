"""Directories in the temporary folder that go with the last process that uses them, however it ends.

make, hold   each process that uses one holds a shared lock on the directory itself (flock); a forked one its own
exit         whoever finds that nobody else holds it removes it
killed       the system drops the lock, and the next process that calls :func:`sweep` removes what nobody holds
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path
from secrets import token_hex

log = logging.getLogger(__name__)


class HeldDirectory:
    """A directory that this process holds; made by :func:`make` and :func:`hold`.

    Attributes
    ----------
    path : Path
    """

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self._handle: int | None = handle
        self._forking: list[int | None] = []
        atexit.register(self.release)
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_in_parent, after_in_child=self._after_in_child
        )

    # A forked process inherits the parent's lock, which both would let go of at once: it is given its own, and before
    # it runs, because the parent may end at once.

    def _before_fork(self) -> None:
        self._forking.append(None if self._handle is None else _open(self.path))

    def _after_in_parent(self) -> None:
        _close(self._forking.pop())

    def _after_in_child(self) -> None:
        _close(self._handle)
        self._handle = self._forking.pop()

    def release(self) -> None:
        """Let go of it; remove it if nobody else holds it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            _remove_if_free(self.path, handle)


# What this process holds; state of the process, as its locks are.
_HELD: dict[Path, HeldDirectory] = {}


def _open(path: Path) -> int | None:
    """Return a handle with a shared lock on the directory; ``None`` if it is gone, or just being removed."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), os.stat(path)):  # not removed between the two lines above
            return handle
    except OSError as error:
        log.debug("%s is not held: %s", path, error)
    os.close(handle)
    return None


def _close(handle: int | None) -> None:
    if handle is not None:
        os.close(handle)


def _remove_if_free(path: Path, handle: int) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        log.debug("%s stays: %s", path, error)
    finally:
        os.close(handle)


def hold(path: Path) -> bool:
    """Hold a directory that another process made, or return ``False`` where there is none (any more)."""
    held = _HELD.get(path)
    if held is not None and held._handle is not None and path.is_dir():
        return True
    handle = _open(path)
    if handle is not None:
        _HELD[path] = HeldDirectory(path, handle)
    return handle is not None


def make(prefix: str) -> Path:
    """Return a new directory whose name begins with ``prefix``, for this user only, that this process holds.

    Those of the same name that nobody holds any more are removed first.
    """
    sweep(prefix)
    while True:
        # Named before it is made: what a signal's handler raises in between leaves nothing either.
        path = Path(tempfile.gettempdir(), prefix + token_hex(4))
        try:
            path.mkdir(0o700)
            if hold(path):
                return path
        except FileExistsError:
            continue
        except BaseException:
            release(path)
            shutil.rmtree(path, ignore_errors=True)
            raise


def sweep(prefix: str) -> None:
    """Remove this user's directories of that name that nobody holds: those of processes that were killed."""
    with os.scandir(tempfile.gettempdir()) as entries:
        found = [Path(each.path) for each in entries if each.name.startswith(prefix)]
    for path in found:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or gone
        if os.fstat(handle).st_uid == os.getuid():
            _remove_if_free(path, handle)
        else:
            os.close(handle)


def release(path: Path) -> None:
    """Let go of a directory that this process holds, before it ends; remove it if nobody else holds it."""
    held = _HELD.pop(path, None)
    if held is not None:
        held.release()
