"""What some tests need of a machine, and whether it is here.

A test says `@pytest.mark.needs("etcd")`, a module `pytestmark = pytest.mark.needs("engine")`. If it
is missing, the test is skipped with "needs etcd: ..."; `make test` ends with how many tests did not
run for each need, and CI fails if one of them is not listed in `tests/may_be_missing.txt`.
"""

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable

from dure import native


def _engine() -> str:
    here, why = native.available()
    return "" if here else why or "the native engine was not built"


def _root() -> str:
    return "" if os.geteuid() == 0 else "this user is not root"


def _etcd() -> str:
    return "" if shutil.which("etcd") else "not found (Debian: etcd-server)"


def _compiler() -> str:
    return "" if shutil.which("cc") else "not found: cc"


def _chromium() -> str:
    return "" if shutil.which("chromium") else "not found (Debian: chromium)"


def _namespaces() -> str:
    from tests.comm import namespace_hosts as hosts

    return hosts.why_not()


def _firewalls() -> str:
    from tests.hosts import networks

    return networks.why_no_firewall()


def _sshd() -> str:
    from tests.launch.procs import ssh_hosts

    return ssh_hosts.why_not()


def _slurm() -> str:
    from tests.placement.procs import slurm_cluster as slurm

    return slurm.why_not()


def _mpi() -> str:
    from tests.comm import mpi_jobs

    return mpi_jobs.why_not()


def _gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "torch finds no GPU"


def _cluster_shell() -> str:
    return "" if importlib.util.find_spec("ClusterShell") else "not installed (extra: cluster)"


def _page() -> str:
    names = ("starlette", "uvicorn")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)} (extra: page)" if missing else ""


def _clients() -> str:
    found = importlib.util.find_spec("accelerate")
    return "" if found else "not installed: accelerate (`make clients` has it)"


def _opentelemetry() -> str:
    found = importlib.util.find_spec("opentelemetry.sdk") if _has("opentelemetry") else None
    return "" if found else "not installed: opentelemetry-sdk"


def _has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _s3() -> str:
    missing = [name for name in ("s3fs", "moto", "flask") if not _has(name)]
    return f"not installed: {', '.join(missing)} (`make stores` has them)" if missing else ""


NEEDS: dict[str, Callable[[], str]] = {
    "engine": _engine,
    "root": _root,
    "etcd": _etcd,
    "chromium": _chromium,
    "compiler": _compiler,
    "network namespaces": _namespaces,
    "firewalls": _firewalls,
    "sshd": _sshd,
    "Slurm": _slurm,
    "MPI": _mpi,
    "GPU": _gpu,
    "extra page": _page,
    "ClusterShell": _cluster_shell,
    "clients": _clients,
    "OpenTelemetry": _opentelemetry,
    "S3": _s3,
}


@functools.cache
def why_missing(need: str) -> str:
    """Return why a need of `NEEDS` is not met on this machine; empty if it is."""
    return NEEDS[need]()
