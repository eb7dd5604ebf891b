"""Versions: what is installed, and whether it fits together."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from importlib import metadata

from dure.cli.doctor.finding import Finding, fine, problem, warning

__all__ = ["Versions", "judge", "judge_same", "read"]

_NEEDED = ("dure", "torch", "pyzmq", "msgspec", "psutil")
_OPTIONAL = ("mpi4py", "ClusterShell")
_OLDEST_TORCH = (2, 11)
_OLDEST_PYTHON = (3, 11)
_OLDEST_KERNEL = (5, 6)  # pidfd_getfd; pidfd_open and memfd are older


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Version texts; a package that is not there is missing from `packages`."""

    python: tuple[int, ...]
    packages: dict[str, str]
    system: str = "Linux"
    kernel: str = "6.0"
    machine: str = "x86_64"
    engine_error: str = ""


def read(engine_error: str = "") -> Versions:
    """Read what is installed, without importing it."""
    packages: dict[str, str] = {}
    for name in (*_NEEDED, *_OPTIONAL):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return Versions(
        python=sys.version_info[:3],
        packages=packages,
        system=platform.system(),
        kernel=platform.release(),
        machine=platform.machine(),
        engine_error=engine_error,
    )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, as in (2, 13, 0) of 2.13.0+cpu."""
    found: list[int] = []
    for part in version.partition("+")[0].partition("-")[0].split("."):
        digits = "".join(c for c in part if c.isdigit())
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)


def judge(versions: Versions) -> list[Finding]:
    """Say what is too old, or missing."""
    shown = ", ".join(f"{name} {number}" for name, number in versions.packages.items())
    found: list[Finding] = [
        fine("versions", f"Python {'.'.join(map(str, versions.python))}, {shown}")
    ]
    if versions.python < _OLDEST_PYTHON:
        found.append(problem("Python", "older than 3.11", "Install Python 3.11 or newer."))
    missing = [name for name in _NEEDED if name not in versions.packages]
    if missing:
        found.append(
            problem("versions", f"not installed: {', '.join(missing)}", "pip install dure torch")
        )
    torch = versions.packages.get("torch")
    if torch is not None and _numbers(torch) < _OLDEST_TORCH:
        found.append(problem("torch", f"{torch} is older than 2.11", "pip install --upgrade torch"))
    found.append(_judge_system(versions))
    return found


def _judge_system(versions: Versions) -> Finding:
    text = f"{versions.system} {versions.kernel} on {versions.machine}"
    if versions.system != "Linux":
        return warning(
            "system", f"{text}: no shared-memory engine, no `dure run`", "backend='gloo' works."
        )
    if _numbers(versions.kernel) < _OLDEST_KERNEL:
        return warning("system", f"{text}: older than 5.6", "A newer kernel; or backend='gloo'.")
    return fine("system", text)


def judge_same(mine: dict[str, str], others: dict[str, str], host: str) -> Finding:
    """Compare the versions on another host with those here."""
    names = sorted({*mine, *others})
    differ = [name for name in names if mine.get(name) != others.get(name)]
    if not differ:
        return fine("same versions", "as here")
    text = ", ".join(
        f"{n} {others.get(n, 'missing')} (here {mine.get(n, 'missing')})" for n in differ
    )
    make = problem if any(name in ("dure", "torch", "python") for name in differ) else warning
    return make("same versions", text, f"Install the same ones on {host} as here.")
