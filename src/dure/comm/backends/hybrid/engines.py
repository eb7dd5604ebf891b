"""The hybrid backend over each of the engines between hosts.

NCCL is not among them: it takes no CPU tensors, and joins the GPUs of a host by itself. A program
that has both writes "cpu:hybrid,cuda:nccl".
"""

from __future__ import annotations

from dure.comm.backends.base import Backend, BackendOptions
from dure.comm.backends.hybrid.creation import create_with

__all__ = ["create_over_gloo", "create_over_mpi"]


def create_over_gloo(options: BackendOptions) -> Backend:
    """Make this rank's part of a group that Gloo joins between hosts (see `hybrid.create_with`)."""
    from dure.comm.backends.torch_engine import create_gloo  # lazy: the engine that is wanted only

    return create_with("hybrid", create_gloo, options)


def create_over_mpi(options: BackendOptions) -> Backend:
    """Make this rank's part of a group that MPI joins between hosts (see `hybrid.create_with`)."""
    from dure.comm.backends.mpi.rendezvous import create_mpi  # lazy: the engine that is wanted only

    return create_with("hybrid_mpi", create_mpi, options)
