"""What this installation and this machine can do, under torch's names."""

from __future__ import annotations

import torch

from dure import env
from dure.comm.backends.mpi import library as mpi_library
from dure.comm.backends.registry import known_backends
from dure.native import available as native_available

__all__ = [
    "get_default_backend_for_device",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
]


def is_available() -> bool:
    """Tell that the package works here."""
    return True


def is_backend_available(backend: str) -> bool:
    """Tell whether the backend `backend` exists and can run on this machine."""
    name = backend.lower()
    if name in {"shm", "hybrid", "hybrid_mpi"} and not native_available()[0]:
        return False
    if name in {"mpi", "hybrid_mpi"}:
        return is_mpi_available()
    if name == "nccl":
        return is_nccl_available()
    if name in {"gloo", "hybrid"}:
        return is_gloo_available()
    return name in known_backends()


def is_gloo_available() -> bool:
    """Tell whether torch was built with Gloo."""
    return hasattr(torch._C, "_distributed_c10d")  # pyright: ignore[reportPrivateUsage]


def is_nccl_available() -> bool:
    """Tell whether torch was built with NCCL, and there is a GPU."""
    return torch.cuda.is_available() and hasattr(torch._C, "_nccl_version")  # pyright: ignore[reportPrivateUsage]


def is_mpi_available() -> bool:
    """Tell whether the backend `mpi` can run: mpi4py is installed, and finds an MPI library.

    MPI is not started by asking.
    """
    return mpi_library.available()


def is_ucc_available() -> bool:
    """Tell whether there is a backend `ucc`."""
    return "ucc" in known_backends()


def is_xccl_available() -> bool:
    """Tell whether there is a backend `xccl`."""
    return "xccl" in known_backends()


def get_default_backend_for_device(device: str | torch.device) -> str:
    """Return the backend that suits `device` best on this machine, ranks on one host assumed."""
    if torch.device(device).type == "cuda":
        return "nccl"
    return "shm" if native_available()[0] else "gloo"


def is_torchelastic_launched() -> bool:
    """Tell whether a launcher (`dure run`, torchrun) started this process."""
    return env.text("TORCHELASTIC_RUN_ID") is not None
