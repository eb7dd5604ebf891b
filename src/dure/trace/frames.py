"""Whose code a frame of a stack is: the program's own, or a library's."""

from __future__ import annotations

import functools
import importlib.util
import sysconfig
from pathlib import Path

__all__ = ["is_library"]


@functools.cache
def _homes() -> tuple[str, ...]:
    """Return where the standard library, Dure and torch are on this machine."""
    spec = importlib.util.find_spec("torch")
    torch = [] if spec is None else spec.submodule_search_locations or []
    standard = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
    return tuple(f"{home}/" for home in (*standard, *torch, Path(__file__).parent.parent))


def is_library(file: str) -> bool:
    """Tell whether a file is the interpreter's, an installed package's or Dure's.

    A checkout of the user's is not, whatever the folders above it are called. The file may be
    another machine's, of which the usual folders are known.
    """
    parts = Path(file).parts
    return file.startswith(("<", *_homes())) or any(
        part in ("site-packages", "dist-packages")
        or (part.startswith("python3.") and parts[i - 1] in ("lib", "lib64"))
        for i, part in enumerate(parts[:-1])
    )
