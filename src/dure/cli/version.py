"""`dure version`, `dure --version`: the versions that a bug report needs."""

from __future__ import annotations

import platform
from importlib import metadata

import dure
from dure.cli.doctor.checks import checkout
from dure.cli.machine import commit
from dure.version import PROTOCOL

_NAMES = ("torch", "pyzmq", "numpy")


def show_version() -> None:
    """Show the versions of Dure and of what it stands on, without importing them.

    In a checkout that has another commit by now than when Dure was installed, that is shown too.
    """
    print(f"dure {dure.__version__}")
    for finding in checkout(dure.__version__, commit()):
        print(f"  {finding.seen}")
    print(f"  protocol {PROTOCOL}")
    for name in _NAMES:
        try:
            number = metadata.version(name)
        except metadata.PackageNotFoundError:
            number = "not installed"
        print(f"{name} {number}")
    print(f"Python {platform.python_version()} on {platform.platform()}")
