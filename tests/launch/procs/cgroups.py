"""A control group with a limit of memory, below this process's own, where the system allows it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import until

_ROOT = Path("/sys/fs/cgroup")


class MemoryLimit:
    """A control group; a process joins it by `join`."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder = folder
        one, two = folder / "memory.limit_in_bytes", folder / "memory.max"
        (one if one.exists() else two).write_text(str(nbytes))
        for swap in (folder / "memory.memsw.limit_in_bytes", folder / "memory.swap.max"):
            if swap.exists():
                swap.write_text(str(nbytes) if "memsw" in swap.name else "0")

    def join(self) -> None:
        """Have this process live by the limit; what it allocates from now on counts."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def highest(self) -> int:
        """Return the most bytes that counted at once; 0 where the system does not tell."""
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            if (self.folder / name).exists():
                return int((self.folder / name).read_text())
        return 0


def own_folder() -> Path | None:
    """Return the folder of this process's own group that limits memory; None without one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if "memory" in kinds.split(","):
            folder = _ROOT / "memory" / path.lstrip("/")
            return folder if folder.is_dir() else None
        if not kinds and (_ROOT / path.lstrip("/") / "memory.max").exists():
            return _ROOT / path.lstrip("/")
    return None


def _removed(folder: Path) -> bool:
    """Remove a group, which processes that were killed leave a moment later."""
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


@contextmanager
def limited(nbytes: int) -> Iterator[MemoryLimit | str]:
    """Give a group whose processes have so many bytes; or the reason why there is none."""
    own = own_folder()
    if own is None:
        yield "this process is in no control group for memory"
        return
    folder = own / f"dure-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        yield f"no control group can be made: {error.strerror}"
        return
    try:
        try:
            limit = MemoryLimit(folder, nbytes)
        except OSError as error:
            yield f"a control group cannot be limited: {error.strerror}"
            return
        yield limit
    finally:
        until(lambda: _removed(folder), "the end of the group's processes")
