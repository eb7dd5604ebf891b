"""Decides whether a stack frame belongs to the user's program or to a library.

A *library* frame is in a file of Dure, torch or Python's standard library. Every part of the
package that reports a line of the program decides here: call sites of operations (the native engine
gets `library_folders`), stacks of threads, tracebacks.

An *installed* file is in `site-packages`. It may still be the program. So the reported line is that
of the innermost frame that is neither a library's nor installed; if there is none, that of the
innermost frame that is not a library's (`user_frame`).
"""

from __future__ import annotations

import functools
import importlib.util
import sysconfig
from collections.abc import Sequence
from pathlib import Path

__all__ = ["is_installed", "is_library", "library_folders", "user_frame"]

_PACKAGES = ("site-packages", "dist-packages")


@functools.cache
def library_folders() -> tuple[tuple[str, bool], ...]:
    """Return path prefixes, the longest first, and whether files below them are a library's.

    The first matching prefix decides; a path without one is not a library's.
    """
    dure = Path(__file__).parent.parent
    spec = importlib.util.find_spec("torch")
    torch = [] if spec is None else spec.submodule_search_locations or []
    folders = {"<": True, f"{dure}/": True}
    folders |= {f"{dure}/{part}/": False for part in ("testing", "cli")}  # programs that use Dure
    folders |= {f"{folder}/": True for folder in torch}
    for name in ("stdlib", "platstdlib"):
        standard = sysconfig.get_path(name)
        folders[f"{standard}/"] = True
        folders |= {f"{standard}/{part}/": False for part in _PACKAGES}
    return tuple(sorted(folders.items(), key=lambda item: -len(item[0])))


@functools.lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    """Return whether `file` belongs to Dure, torch or the standard library.

    A source checkout of the user does not, even below a folder with such a name. The file may be of
    another machine, where only the usual folders are recognized.
    """
    for beginning, library in library_folders():
        if file.startswith(beginning):
            return library
    parts = Path(file).parts
    for i, part in enumerate(parts[:-1]):
        if part in _PACKAGES:
            return parts[i + 1] == "torch"
        if part.startswith("python3.") and parts[i - 1] in ("lib", "lib64"):
            return parts[i + 1] not in _PACKAGES or parts[i + 2] == "torch"
    return False


def is_installed(file: str) -> bool:
    """Return whether `file` belongs to an installed package."""
    return any(part in _PACKAGES for part in Path(file).parts)


def user_frame(files: Sequence[str]) -> int | None:
    """Return the index of the frame of the program in a stack; None if there is none.

    Args:
        files: The files of the stack's frames, the innermost first.
    """
    own = [i for i, file in enumerate(files) if not is_library(file)]
    return next((i for i in own if not is_installed(files[i])), own[0] if own else None)
