"""MPI's own nonblocking collectives, in groups that do not compare calls.

With ``pg_options={"verify": False}`` no headers are exchanged, and MPI's collectives are used if
they are faster than Dure's: for short tensors. They support neither 16 bit floats nor averages,
lose NaN in minima and maxima, and fold the ranks in an unspecified order. So they are used for
broadcasts, sums and products of float32, float64 and integers, and the other reductions of
integers.

They cannot be canceled. A rank polls them like any other request, so a wait has a limit and can be
interrupted; the memory of an abandoned one is kept (`mpi.progress`).

All ranks make the same choice: it depends only on arguments that must be equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dure.comm.backends.mpi.memory import piece_of
from dure.comm.call import Call

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["OwnCollectives"]

_MOST = {"all_reduce": 64 << 10, "reduce": 16 << 10, "broadcast": 4 << 20}
"""The longest tensors, in bytes, for which MPI is faster.

Measured: docs/decisions/0010-foreign-engines.md.
"""

_FLOATS = {torch.float32: "FLOAT", torch.float64: "DOUBLE"}
_INTEGERS = {
    getattr(torch, f"{sign}int{bits}"): f"{sign}int{bits}_t".upper()
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}
_OF_ALL = {"SUM": "SUM", "PRODUCT": "PROD"}
_OF_INTEGERS = {"MIN": "MIN", "MAX": "MAX", "BAND": "BAND", "BOR": "BOR", "BXOR": "BXOR"}


class OwnCollectives:
    """The collectives of MPI on one communicator.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: The group's communicator.
    """

    def __init__(self, mpi: Any, comm: MPI.Intracomm) -> None:
        self._mpi, self._comm = mpi, comm
        self._starts: dict[str, Callable[[Call], Any]] = {
            "all_reduce": self._all_reduce,
            "reduce": self._reduce,
            "broadcast": self._broadcast,
        }

    def takes(self, call: Call) -> bool:
        """Return whether MPI is faster for this call."""
        if call.kind not in self._starts or call.outputs[0].nbytes > _MOST[call.kind]:
            return False
        return call.reduction is None or self._operator(call) is not None

    def start(self, call: Call) -> Any:
        """Start it; return MPI's request."""
        return self._starts[call.kind](call)

    def _operator(self, call: Call) -> Any:
        dtype, name = call.outputs[0].dtype, call.needed_reduction.name
        known = _OF_ALL if dtype in _FLOATS else _OF_ALL | _OF_INTEGERS
        if name not in known or (dtype not in _FLOATS and dtype not in _INTEGERS):
            return None
        return getattr(self._mpi, known[name])

    def _elements(self, tensor: torch.Tensor) -> list[Any]:
        datatype = getattr(self._mpi, (_FLOATS | _INTEGERS)[tensor.dtype])
        return [self._mpi.memory.fromaddress(*piece_of(tensor)), tensor.numel(), datatype]

    def _all_reduce(self, call: Call) -> Any:
        memory, operator = self._elements(call.outputs[0]), self._operator(call)
        return self._comm.Iallreduce(self._mpi.IN_PLACE, memory, operator)

    def _reduce(self, call: Call) -> Any:
        memory, operator = self._elements(call.outputs[0]), self._operator(call)
        if self._comm.Get_rank() == call.root:
            return self._comm.Ireduce(self._mpi.IN_PLACE, memory, operator, call.root)
        return self._comm.Ireduce(memory, None, operator, call.root)

    def _broadcast(self, call: Call) -> Any:
        memory = self._mpi.memory.fromaddress(*piece_of(call.outputs[0]))
        return self._comm.Ibcast([memory, self._mpi.BYTE], call.root)
