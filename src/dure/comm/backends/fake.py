"""The fake backend: one process runs as a rank of a world of any size, and nothing is sent.

For dry runs: a program of thousands of ranks can be built, sharded, traced and counted in one
process. Results that this rank's own tensors determine are written, the others are unchanged:

| operation                   | outputs on this rank                                           |
|-----------------------------|----------------------------------------------------------------|
| all_gather, gather (root)   | this rank's input, in every rank's place                      |
| reduce_scatter              | this rank's part of its own input                             |
| scatter (root)              | this rank's part                                              |
| all_to_all                  | what this rank sends; cut, or filled with zeros, to the length |
| all others                  | unchanged                                                     |

Tensors without values (`FakeTensorMode`, device meta) are accepted, and stay as they are.

Outputs of receives, and of scatter on ranks other than the root, keep their values. The other ranks
do not exist: a group of this backend can be made without them (`Rendezvous.alone`).

If `pg_options.error_on_collective` is true, every collective raises `CommError`.

Source: torch's backend of the same name (FakeProcessGroup.hpp), with the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch

from dure.comm.backends.base import BackendOptions
from dure.comm.backends.request import Request, finished
from dure.comm.call import Call
from dure.comm.capture import has_no_values
from dure.comm.memory import heap_empty
from dure.errors import CommError

__all__ = ["FakeBackend"]


class FakeBackend:
    """The only rank of a group that exists; the contract is that of `Backend`."""

    name = "fake"
    device_types = frozenset({"cpu", "cuda", "hpu", "meta", "xpu"})
    compares_calls = True
    channels = 2

    def __init__(self, options: BackendOptions) -> None:
        self._rank, self._size = options.rank, options.size
        self._fails = bool(getattr(options.pg_options, "error_on_collective", False))

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: no operation waits."""

    def run(self, call: Call, async_op: bool) -> Request | None:
        if self._fails:
            raise CommError(
                "a collective of a fake group failed as asked",
                op=call.op,
                seen="error_on_collective",
            )
        if not has_no_values((*call.inputs, *call.outputs)):
            with torch.no_grad():
                self._write(call)
        return finished() if async_op else None

    def _write(self, call: Call) -> None:
        match call.kind:
            case "all_gather":
                if call.single:
                    (output,) = call.outputs
                    output.view(self._size, -1).copy_(call.inputs[0].view(1, -1))
                else:
                    _copy(call.outputs, list(call.inputs) * self._size)
            case "gather" if call.root == self._rank:
                _copy(call.outputs, list(call.inputs) * self._size)
            case "reduce_scatter":
                _copy(call.outputs, [self._part(call)])
            case "scatter" if call.root == self._rank:
                _copy(call.outputs, [call.inputs[self._rank]])
            case "all_to_all":
                _copy(call.outputs, call.inputs)
            case _:
                pass

    def _part(self, call: Call) -> torch.Tensor:
        """Return this rank's part of a reduce_scatter's input."""
        if not call.single:
            return call.inputs[self._rank]
        return call.inputs[0].view(self._size, -1)[self._rank]

    def send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Request | None:
        return finished() if async_op else None

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Request:
        return finished(source=0 if src is None else src)

    def allocate(self, nbytes: int, node_shared: bool) -> torch.Tensor | None:
        """See `Backend.allocate`: memory of this rank alone."""
        return heap_empty(nbytes, dtype=torch.uint8, zeroed=True, must=False)

    def close(self, abort: bool) -> None:
        """Do nothing: no operation is pending, and no rank listens."""


def _copy(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Copy each input to its output; fill the rest of a longer output with zeros."""
    for output, given in zip(outputs, inputs, strict=True):
        if output.numel() == given.numel():
            output.view(-1).copy_(given.view(-1))
        else:
            n = min(output.numel(), given.numel())
            flat = output.view(-1)
            flat[:n].copy_(given.view(-1)[:n])
            flat[n:].zero_()
