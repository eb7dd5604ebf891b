"""Paths in a store that fsspec reaches: `s3://`, `gs://`, `memory://` and others.

Checkpoints rely on these promises of a store, and on no others:

- An object appears at once, complete, when its upload is complete; one that was not completed is
  never seen. So each file of slices is an upload, and the manifest is one, the last.
- There is no rename that is atomic for several objects, and mostly no folder: a folder is the
  beginning of names. So the folder of a run's checkpoint has its final name from the first byte on,
  and is a checkpoint if it has a manifest (`folder`).
- There are no locks. The holder of a folder renews an object (`lease`).

Lists of names are never taken from fsspec's caches: another process may have written since.
A store with folders, such as `sftp://`, is used the same way; if it shows files before they are
complete, a torn manifest is found by its checksum.
"""

from __future__ import annotations

import errno
import glob
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any, cast

from dure.errors import UsageError

__all__ = ["AnyPath", "FsspecPath", "absolute", "local_path", "path_of"]

_WITHOUT_FOLDERS = frozenset(
    "s3 s3a gs gcs abfs abfss az adl oss oci obs cos r2 tos hf memory".split()  # noqa: SIM905
)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+._-]*)://(.*)", re.DOTALL)
_CHAIN = re.compile(r"[A-Za-z][A-Za-z0-9+._-]*(://.*)?::", re.DOTALL)
_LOST_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+._-]+:/(?!/)")
_UPLOAD_BYTES, _MOST_PARTS = 32 << 20, 5000
"""A part of an upload at least, and parts at most: S3 allows 10,000."""
_LOCAL = ("file", "local")
_NUMBERS = (
    (FileNotFoundError, errno.ENOENT),
    (FileExistsError, errno.EEXIST),
    (PermissionError, errno.EACCES),
    (TimeoutError, errno.ETIMEDOUT),
)
"""Of errors that a client raises without a number."""


@dataclass(frozen=True, order=True)
class FsspecPath:
    """A folder or a file in a store, with the methods of `pathlib.Path` that checkpoints use.

    `Checkpointer.save` and `latest` return one for a run at a URL.

    Args:
        url: Its address, without a slash at the end.

    Raises:
        OSError: Any method, if the store's client fails; it has the URL and the client's text.
        UsageError: Any method, if the package of the store is not installed.

    Cost:
        One request to the store for each method that does more than join names.

    Threads:
        Any thread may use it.

    Example:
        ```python
        from dure.checkpoint import FsspecPath, save

        run = FsspecPath("memory://runs/named")
        save({"weight": torch.ones(2)}, checkpoint_id=run / "first", no_dist=True)
        assert (run / "first" / "manifest.json").is_file()
        ```
    """

    url: str

    def __str__(self) -> str:
        """Return the address."""
        return self.url

    def __fspath__(self) -> str:
        """Return the address, so that it can be passed where a path is expected."""
        return self.url

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> FsspecPath:
        """The folder that contains it; for the root of a store, itself."""
        above = self.url.rpartition("/")[0]
        return self if above.endswith("/") else FsspecPath(above)

    def __truediv__(self, name: str | PurePath) -> FsspecPath:
        """Return a path below this one, or the other path if that is an address."""
        text = str(name)
        return FsspecPath(text if "://" in text else f"{self.url.rstrip('/')}/{text}")

    def with_name(self, name: str) -> FsspecPath:
        """Return the path of that name in the same folder."""
        return self.parent / name

    def resolve(self) -> FsspecPath:
        """Return this path: a store has no links."""
        return self

    def exists(self) -> bool:
        """Return whether there is a file of this name, or files below it."""
        return self._kind() is not None

    def is_dir(self) -> bool:
        """Return whether there are files below this name."""
        return self._kind() == "directory"

    def is_file(self) -> bool:
        """Return whether there is a file of this name."""
        return self._kind() == "file"

    def size(self) -> int:
        """Return the length of the file; FileNotFoundError if there is none."""
        return int(self._call(lambda fs, key: fs.info(key))["size"])

    def names(self) -> list[str]:
        """Return the names of what is in this folder; none if it does not exist."""
        try:
            found = cast(list[str], self._call(_listed))
        except FileNotFoundError:
            return []
        return sorted(name.rstrip("/").rpartition("/")[2] for name in found)

    def read(self, at: int, count: int) -> bytes:
        """Return so many bytes of the file from byte `at` on; fewer at its end."""
        if not count:
            return b""
        return cast(bytes, self._call(lambda fs, key: fs.cat_file(key, start=at, end=at + count)))

    def write(self, data: bytes, new: bool = False) -> None:
        """Write a file, which is replaced when the new one is complete.

        Args:
            data: Its content.
            new: Whether another file of the name is an error, FileExistsError. If the store cannot
                exclude that another process writes it at the same time, it is only looked for.
        """
        if new and self.is_file():
            raise FileExistsError(errno.EEXIST, "there is such a file", self.url)
        self._call(lambda fs, key: (_created if new else _replaced)(fs, key, data))

    @contextmanager
    def uploading(self, num_bytes: int) -> Iterator[Callable[[memoryview], None]]:
        """Write a new file piece by piece; it appears at the end, and not after an error.

        Args:
            num_bytes: How long it will be.

        Yields:
            What writes bytes to it.

        Raises:
            FileExistsError: There is such a file.

        Cost:
            Memory of some parts of an upload, each of 32 MiB, or num_bytes / 5,000 if that is more.
        """
        if self.is_file():
            raise FileExistsError(errno.EEXIST, "there is such a file", self.url)
        mib = num_bytes // _MOST_PARTS // (1 << 20) + 1  # Google wants multiples of 256 KiB
        part = max(_UPLOAD_BYTES, mib << 20)
        file = self._call(lambda fs, key: fs.open(key, "wb", block_size=part))

        def write(data: memoryview) -> None:
            with self._converted():
                file.write(data)

        try:
            yield write
            with self._converted():
                file.close()
        except BaseException:
            with suppress(Exception):
                file.discard()  # parts that were uploaded; closing the file would complete it
            with suppress(Exception):
                file.closed = True  # nor must the collector close it
            with suppress(Exception):
                self.unlink(missing_ok=True)  # of a store that shows files before they are complete
            raise

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the file."""
        try:
            self._call(lambda fs, key: fs.rm_file(key))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_tree(self) -> None:
        """Remove all files below this name."""
        with suppress(FileNotFoundError):  # its name is not a pattern
            self._call(lambda fs, key: fs.rm(glob.escape(key), recursive=True))

    def make(self) -> None:
        """Make the folder, if the store has folders; in others a folder is where a file is."""
        if self.url.partition("://")[0].lower() not in _WITHOUT_FOLDERS:
            self._call(lambda fs, key: fs.makedirs(key, exist_ok=True))

    def _kind(self) -> str | None:
        try:
            return str(self._call(lambda fs, key: fs.info(key))["type"])
        except FileNotFoundError:
            return None

    def _call(self, request: Callable[[Any, str], Any]) -> Any:
        """Make a request to the store; every error but a UsageError is an OSError."""
        file_system = _file_system(self.url)
        with self._converted():
            return request(file_system, file_system._strip_protocol(self.url))

    @contextmanager
    def _converted(self) -> Iterator[None]:
        """Convert errors of the store's client, which are of its own classes, to OSError."""
        try:
            yield
        except OSError as e:
            number = e.errno or next((n for kind, n in _NUMBERS if isinstance(e, kind)), errno.EIO)
            text = e.strerror or str(e) or os.strerror(number)
            if isinstance(e, FileNotFoundError) and not e.strerror:  # it may have the key alone
                text = f"{os.strerror(number)} ({text})"
            raise OSError(number, text, self.url) from e
        except Exception as e:
            raise OSError(errno.EIO, f"{type(e).__name__}: {e}", self.url) from e


AnyPath = Path | FsspecPath


def _listed(fs: Any, key: str) -> list[str]:
    """Return the keys below one; some stores list the folder itself, as an empty object."""
    own = key.strip("/")
    return [name for name in fs.ls(key, detail=False) if name.strip("/") != own]


def _replaced(fs: Any, key: str, data: bytes) -> None:
    fs.pipe_file(key, data)


def _created(fs: Any, key: str, data: bytes) -> None:
    """Write a file that must not exist, if the store supports that."""
    try:
        fs.pipe_file(key, data, mode="create")
    except (NotImplementedError, TypeError, ValueError):
        fs.pipe_file(key, data)


def path_of(where: str | os.PathLike[str]) -> AnyPath:
    """Return the absolute path of a folder or file, or the path in a store if it is a URL.

    A URL of a local file, `file:///runs/a`, is a local path.

    Raises:
        UsageError: The URL is of a store that is not known, or whose package is not installed. Or
            it is a chain of URLs, or has lost a slash, and would be the name of a local folder.
    """
    text = os.fspath(where)
    url = _SCHEME.fullmatch(text)
    if "://" in text and _CHAIN.match(text):
        raise UsageError(
            "a checkpoint cannot be at a chain of URLs",
            seen=text,
            fix="Pass the URL of the store alone.",
        )
    if url is None:
        if _LOST_SLASH.match(text):
            raise UsageError(
                "the URL of a checkpoint has one slash for two",
                seen=f"{where!r}",
                fix="Pass the URL as a str: pathlib and os.path remove a slash. "
                f"The local folder is ./{text}.",
            )
        return Path(where).absolute()
    if url[1].lower() in _LOCAL:
        return Path(url[2]).absolute()
    if not url[2].strip("/"):
        raise UsageError("the URL of a checkpoint names no folder", seen=text)
    path = FsspecPath(text.rstrip("/"))
    _file_system(path.url)
    return path


def absolute(where: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Make a local path absolute, as the program may change its working directory later.

    Raises:
        UsageError: As `path_of`; but a store is not looked for.
    """
    url = _SCHEME.fullmatch(os.fspath(where))
    return where if url is not None and url[1].lower() not in _LOCAL else path_of(where)


def local_path(path: AnyPath, content: str) -> Path:
    """Return a path that must be a local one; UsageError if it is in a store.

    Args:
        path: The path.
        content: A name for the error of the file or folder at the path.
    """
    if isinstance(path, FsspecPath):
        raise UsageError(
            f"{content} cannot be at a URL",
            seen=str(path),
            fix="Give a local path. Checkpoints of dure.checkpoint.save can be at a URL.",
        )
    return path


def _file_system(url: str) -> Any:
    """Return what fsspec makes for a URL; it keeps one for each thread and process.

    Raises:
        UsageError: fsspec, or what it needs for that store, is not installed.
    """
    try:
        url_to_fs: Any = import_module("fsspec.core").url_to_fs  # an extra
    except ImportError:
        raise UsageError(
            "a checkpoint at a URL needs fsspec, which is not installed",
            seen=url,
            fix="pip install 'dure[fsspec]'",
        ) from None
    try:
        return url_to_fs(url, use_listings_cache=False)[0]
    except ImportError as e:
        raise UsageError(
            "the package for the store of a checkpoint is not installed",
            seen=f"{url}: {e}",
            fix="pip install 'dure[fsspec]', and the package that is named here.",
        ) from e
    except ValueError as e:
        raise UsageError("the URL of a checkpoint cannot be used", seen=f"{url}: {e}") from e
    except Exception as e:  # the client of the store: no credentials, a wrong setting
        raise OSError(errno.EIO, f"{type(e).__name__}: {e}", url) from e
