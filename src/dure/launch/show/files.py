"""Files of ours in a directory that others may write to, as `--log-dir` in a shared place is.

Who may write there can put a symbolic link where a file of ours will be, and have us overwrite
whatever it points to; or a pipe, and have us wait for ever. So below the directory that the user
has named, each step is taken from the last one's descriptor and follows no link, and what is opened
is looked at before anything in it is changed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ["directory_below", "open_in"]

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_IN_THE_WAY = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR)


@contextlib.contextmanager
def directory_below(top: Path, *names: str) -> Iterator[int]:
    """Open a directory below `top`, made where it is missing, and yield its descriptor.

    Raises:
        OSError: It cannot be made, or something else is in its place, such as a symbolic link.
    """
    with contextlib.ExitStack() as opened:
        fd, path = os.open(top, _DIRECTORY), top
        opened.callback(os.close, fd)
        for name in names:
            path /= name
            with _named(path):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=fd)
                fd = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            opened.callback(os.close, fd)
        yield fd


def open_in(directory: int, path: Path) -> int:
    """Open a file to write it anew; return its descriptor.

    Args:
        directory: The descriptor of the directory that `path` is in.
        path: The file, for its name, and for what an error says.

    Raises:
        OSError: It cannot be made, or what has its name is no regular file.
    """
    with _named(path):
        fd = os.open(path.name, _FILE, 0o666, dir_fd=directory)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.ENXIO, "")
            os.ftruncate(fd, 0)
        except OSError:
            os.close(fd)
            raise
    return fd


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let an error say which file it is about, and what is in its way."""
    try:
        yield
    except OSError as error:
        text = error.strerror
        if error.errno in _IN_THE_WAY:
            text = "a link, or something else that is not ours, has its name; remove it"
        raise OSError(error.errno, text, str(path)) from None
