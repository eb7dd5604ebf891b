"""What a core dump of a living process would hold, read from outside as the kernel does."""

import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["dump_of", "kept_in_files"]

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \d+\s*(.*)")


def dump_of(pid: int) -> bytes:
    """All private memory of a process but what it has asked to be left out, as one text.

    Pieces that follow each other in memory do so in the text.
    """
    parts: list[bytes] = []
    end = 0
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for start, stop in _dumped(Path(f"/proc/{pid}/smaps").read_text()):
            memory.seek(start)
            try:
                data = memory.read(stop - start)
            except OSError:  # [vvar] and its like
                continue
            parts += [b"" if start == end else b"\0" * 64, data]
            end = stop
    return b"".join(parts)


def _dumped(smaps: str) -> Iterator[tuple[int, int]]:
    """Yield the mappings that are in memory, the process's own, and not marked `dd` (DONTDUMP)."""
    start = stop = resident = 0
    rights = ""
    for line in smaps.splitlines():
        if match := _MAPPING.match(line):
            start, stop, rights = int(match[1], 16), int(match[2], 16), match[3]
        elif line.startswith("Rss:"):
            resident = int(line.split()[1])
        elif line.startswith("VmFlags:"):
            flags = line.split()[1:]
            if rights.startswith("r") and rights.endswith("p") and resident and "dd" not in flags:
                yield start, stop


def kept_in_files() -> bool:
    """Tell whether the kernel puts a dump into the directory of the process that crashed."""
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    return pattern.startswith("core")
