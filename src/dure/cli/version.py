"""`dure version`: the versions that a bug report needs."""

from __future__ import annotations

import platform
from importlib import metadata

_NAMES = ("dure", "torch", "pyzmq", "numpy")


def show_version() -> None:
    """Show the versions of Dure and of what it stands on, without importing them."""
    for name in _NAMES:
        try:
            number = metadata.version(name)
        except metadata.PackageNotFoundError:
            number = "not installed"
        print(f"{name} {number}")
    print(f"Python {platform.python_version()} on {platform.platform()}")
