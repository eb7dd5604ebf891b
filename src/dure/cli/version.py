"""`dure version`, `dure --version`: the versions that a bug report needs."""

from __future__ import annotations

import platform
from importlib import metadata

import dure
from dure.cli.machine import commit
from dure.version import PROTOCOL

_NAMES = ("torch", "pyzmq", "numpy")


def show_version() -> None:
    """Show the versions of Dure and of the packages it needs, without importing them."""
    print(f"dure {dure.__version__}")
    if note := checkout_note(dure.__version__, commit()):
        print(f"  {note}")
    print(f"  protocol {PROTOCOL}")
    for name in _NAMES:
        try:
            number = metadata.version(name)
        except metadata.PackageNotFoundError:
            number = "not installed"
        print(f"{name} {number}")
    print(f"Python {platform.python_version()} on {platform.platform()}")


def checkout_note(version: str, at: str) -> str:
    """Return a note if a version was built from another commit than that of the checkout.

    Args:
        version: Of the installation.
        at: The commit of the checkout; "none" if Dure does not run from one.
    """
    built = version.partition("+g")[2].partition(".")[0]
    clean = at.partition("-")[0]
    if not built or clean == "none" or built.startswith(clean) or clean.startswith(built):
        return ""
    return (
        f"the checkout is at {at}, and Dure was installed from {built}: its version, which the "
        "ranks of a job compare, is that of the installation"
    )
