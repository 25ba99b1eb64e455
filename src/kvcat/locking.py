"""One process at a time in a folder, or on a file, that is written to."""

import errno
import os
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from kvcat.errors import InputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class FolderLock:
    """Holds a folder for this process until ``release``, the end of a ``with`` block, or the end of the process.

    The lock is advisory (``flock``) and lies on the folder itself: nothing is written, so nothing is left behind, and
    the operating system releases it however the process ends. Processes forked meanwhile share it. Where the platform
    or the file system has no such lock (Windows, some network drives) a warning says that nothing guards the folder.

    Args:
        folder: an existing folder or file.
        shared: others may hold it too, as long as they share it as well.
        enabled: False holds nothing, for the processes of a group that leave the writing to one of them.

    Raises:
        InputError: another lock holds the folder, of this process or of another; or the folder cannot be opened.
    """

    _close: Callable[[], object] | None = None

    def __init__(self, folder: Path, *, shared: bool = False, enabled: bool = True) -> None:
        if not enabled:
            return
        if fcntl is None:
            _warn(folder, "this platform")
            return
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError as error:
            raise InputError(f"cannot open {folder}: {error.strerror}") from None
        self._close = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            self._close()
            if error.errno in _TAKEN:
                raise InputError(
                    f"another process is writing to {folder}: wait for its end, or choose another folder"
                ) from None
            _warn(folder, "its file system")

    def release(self) -> None:
        """Lets others in; a second call does nothing."""
        if self._close is not None:
            self._close()

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _warn(folder: Path, what: str) -> None:
    warnings.warn(f"{what} has no file locks: do not let two processes write to {folder}", RuntimeWarning, stacklevel=3)
