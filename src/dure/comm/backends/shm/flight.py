"""The shm engine's own ring of operations, as the flight recorder wants it.

The engine records every operation below Python (csrc/core/flight.h), which costs some 15 ns; names
and errors are made here, when records are read.
"""

from __future__ import annotations

from dure.comm.backends.base import BackendOptions, channel_name
from dure.comm.codes import dtype_name
from dure.native import Group
from dure.native.status import error_name
from dure.trace.events import State
from dure.trace.record import MESSAGES, Origin, Record

__all__ = ["EngineFlight"]

_RUNNING, _OK = -1, 0


class EngineFlight:
    """What one rank did lately in one group (a `trace.record.RecordSource`).

    Threads:
        `records` may be called from any thread, and from a signal handler, at any time.
    """

    def __init__(self, group: Group, options: BackendOptions) -> None:
        self._group = group
        self.origin = Origin(
            group=options.name,
            rank=options.rank,
            global_ranks=options.global_ranks,
            backend="shm",
        )

    def records(self, last: int | None = None) -> list[Record]:
        """Return the engine's records, the oldest first; or only the `last` ones."""
        o = self.origin
        found: list[Record] = []
        num_messages = 0
        entries = self._group.flight()
        first = len(entries) - last if last else 0
        for number, entry in enumerate(entries):
            seq, op, dtype, reduction, nbytes, peer, tag = entry[:7]
            is_async, status, start_ns, end_ns, file, line, function, channel = entry[7:]
            message = op in MESSAGES
            num_messages += message
            if number < first:
                continue
            state = State.STARTED if status == _RUNNING else State.SUCCEEDED
            found.append(
                Record(
                    group=channel_name(o.group, channel),
                    op=op,
                    seq=num_messages if message else seq,
                    rank=o.rank,
                    global_rank=o.global_rank,
                    world_size=len(o.global_ranks),
                    dtype=dtype_name(dtype) if nbytes else "",
                    nbytes=nbytes,
                    peer=peer if peer >= 0 else None,
                    tag=tag if message else None,
                    reduction=reduction.upper(),
                    async_op=is_async,
                    file=file,
                    line=line,
                    function=function,
                    start_ns=start_ns,
                    end_ns=end_ns,
                    state=State.FAILED if status > _OK else state,
                    error=error_name(status) if status > _OK else "",
                )
            )
        return found
