"""`dure doctor --report`: the contents of a bug report, as Markdown, without secrets.

Each part is made by itself: one that fails says so, and the others are complete. At last everything
that may be a secret is replaced in the text (`without_secrets`), wherever it came from: values of
variables whose names look like a secret's, passwords in URLs, keys and tokens.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from urllib.parse import quote

from rich.console import Console

import dure
from dure import env
from dure.cli import machine
from dure.cli.doctor.checks import Finding
from dure.errorfile import read_error
from dure.errors import UsageError
from dure.placement import set_here
from dure.store.system import control_groups, kernel_text

__all__ = ["report", "shown_variables", "without_secrets"]

_PACKAGES = (
    *("dure", "torch", "numpy", "pyzmq", "msgspec", "psutil", "mpi4py", "ClusterShell"),
    *("typer", "rich", "nvidia-nccl-cu12", "torchvision", "transformers", "lightning"),
)
_PREFIXES = (
    *("TORCH", "PYTORCH", "NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "GOMP_", "CUDA_", "HIP_"),
    *("UCX_", "OMPI_MCA_", "MPI4PY_", "OPENBLAS_", "MALLOC_", "PET_"),
)
_SECRET_NAME = re.compile(
    r"KEY|TOKEN|SECRET|PASS|CRED|AUTH(?!OR(?!I[ZS]))|COOKIE|PRIVATE|SIGNATURE", re.I
)
_LEAST = 6
"""Shorter values of secret variables, such as the number of a descriptor, are not looked for."""
_PATTERNS = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S),
    re.compile(r"(?<=://)[^\s/@:\"'<>]*:[^\s\"'<>]*@"),  # a password with a slash or an @
    re.compile(r"(?<=://)[^\s/@]+@"),
    re.compile(r"(?i)(?:(?<=bearer )|(?<=basic ))[\w.~+/=-]{8,}"),
    re.compile(
        r"(?i)(?:password|passwd|passphrase|_pwd|token|secret|(?:api|access|account|secret)[_-]?key)"
        r"[\"']?\s*[=:]\s*(?:\"[^\"\n]+\"|'[^'\n]+'|[\"']?[^\s\"',;&]+)"
    ),
    re.compile(r"\b(?:hf_|gh[a-z]_|github_pat_|glpat-|sk-|xox[a-z]-|AKIA|AIza|eyJ)[\w.-]{12,}"),
    re.compile(r"\b[0-9a-fA-F]{48,}\b"),
)
_KERNEL_FILES = (
    *("kernel/osrelease", "kernel/pid_max", "kernel/threads-max", "kernel/yama/ptrace_scope"),
    *("vm/overcommit_memory", "vm/max_map_count", "vm/memfd_noexec", "vm/swappiness"),
    *("fs/file-max", "net/core/somaxconn", "net/ipv4/ip_local_port_range"),
)
_LIMITS = ("NOFILE", "NPROC", "MEMLOCK", "AS", "FSIZE", "DATA", "STACK", "CORE")
_GROUP_FILES = ("memory.max", "memory.high", "cpu.max", "pids.max")
_LONGEST = 400
_MOST_ERRORS = 8
_LAST_LINES = 60
_UNBROKEN = 10_000
"""Columns of a table: a secret that is broken into lines would not be found."""


def report(findings: Sequence[Finding], traces: Path | None = None) -> str:
    """Return the report.

    Args:
        findings: The doctor's findings.
        traces: A folder with flight records or error files of a job.

    Raises:
        UsageError: There is no such folder.
    """
    if traces is not None and not traces.is_dir():
        raise UsageError("--traces must be a folder", seen=f"{traces} is not one")
    parts: dict[str, Callable[[], str]] = {
        "Versions": _versions,
        "Machine": _machine,
        "Limits": _limits,
        "Environment variables": lambda: _lines(shown_variables(env.everything())),
        "Findings of the doctor": lambda: _findings(findings),
    }
    if traces is not None:
        parts["Errors of ranks"] = lambda: _errors(traces)
        parts["Flight records"] = lambda: _flights(traces)
    text = ["# Dure: report of this machine", ""]
    for title, make in parts.items():
        try:
            content = make()
        except Exception as error:  # one part's failure must not take away the others
            content = f"could not be read: {type(error).__name__}: {error}"
        content = content.strip().replace("```", "'''") or "none"
        text += [f"## {title}", "", "```", content, "```", ""]
    return without_secrets("\n".join(text), env.everything())


def without_secrets(text: str, environ: Mapping[str, str]) -> str:
    """Replace in `text` what is, or looks like, a secret; `environ` has variables with secrets."""
    secrets = {
        line.strip(): name
        for name, value in environ.items()
        if _SECRET_NAME.search(name)
        for line in (value, *value.splitlines(), *_other_forms(value))
        if len(line.strip()) >= _LEAST
    }
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, f"(value of {secrets[value]})")
    for pattern in _PATTERNS:
        text = pattern.sub("(left out)", text)
    return text


def _other_forms(value: str) -> tuple[str, ...]:
    """Return what `repr`, JSON and URLs write for a value."""
    return repr(value)[1:-1], json.dumps(value)[1:-1], quote(value), quote(value, safe="")


def shown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of Dure, torch, their libraries and launchers, without secret values."""
    known = set(env.VARIABLES) - {"PATH"} | set(set_here(environ))
    return {
        name: "(set, not shown)" if _SECRET_NAME.search(name) else environ[name]
        for name in sorted(environ)
        if name in known or name.startswith(("DURE", *_PREFIXES))
    }


def _lines(values: Mapping[str, object]) -> str:
    """Write each value on a line of its own, without secrets: a part of one would not be found."""
    environ = env.everything()
    shown = {
        name: without_secrets(str(value), environ).replace("\n", " ")
        for name, value in values.items()
        if value
    }
    return "\n".join(
        f"{name}: {value[:_LONGEST]}{'...' if len(value) > _LONGEST else ''}"
        for name, value in shown.items()
    )


def _versions() -> str:
    found = {"dure": dure.__version__, "commit": machine.commit()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.setdefault(name, metadata.version(name))
    python = f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})"
    return _lines({**found, "Python": python, "C library": " ".join(platform.libc_ver())})


def _machine() -> str:
    load = ", ".join(f"{load:.2f}" for load in os.getloadavg())
    more = {"System": platform.platform(), "Load": load}
    return _lines({**dict(machine.machine()), **more, "Time": time.strftime("%F %T %z")})


def _limits() -> str:
    values: dict[str, object] = {}
    for name in _LIMITS:
        both = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        texts = ["unlimited" if n == resource.RLIM_INFINITY else str(n) for n in both]
        values[f"RLIMIT_{name}"] = " of ".join(texts)
    values |= {file: kernel_text(Path("/proc/sys") / file) for file in _KERNEL_FILES}
    for group in control_groups(Path("/"), ""):
        values |= {f"{group / file}": kernel_text(group / file) for file in _GROUP_FILES}
    return _lines(values)


def _findings(findings: Sequence[Finding]) -> str:
    return "\n".join(
        f"{found.level.value:<8} {found.check}: {found.seen}"
        + (f"\n{'':<8} -> {found.advice}" if found.advice else "")
        for found in findings
    )


def _errors(folder: Path) -> str:
    """Return what ranks wrote into error files, the newest first."""
    files = [path for path in folder.rglob("*.json") if path.is_file()]
    texts: list[str] = []
    for path in sorted(files, key=lambda path: -path.stat().st_mtime):
        error = read_error(path) if len(texts) < _MOST_ERRORS else None
        if error is not None:
            traceback = without_secrets(error.traceback, env.everything())  # before it is cut
            lines = [*traceback.splitlines(), error.message][-_LAST_LINES:]
            texts.append("\n".join([f"{path.relative_to(folder)}:", *lines]))
    return "\n\n".join(texts)


def _flights(folder: Path) -> str:
    """Return what `dure trace merge` prints for every folder with flight records."""
    from dure.cli.trace import print_merged  # lazy: most reports have no records

    texts: list[str] = []
    for each in sorted({path.parent for path in folder.rglob("rank*.json")}):
        printed = io.StringIO()
        console = Console(file=printed, width=_UNBROKEN)
        with contextlib.suppress(UsageError):  # no flight records after all
            print_merged(console, each)
            texts.append(f"{each.relative_to(folder)}:\n{printed.getvalue()}")
    return "\n".join(texts)
