"""Streams beside that of the computation, on devices that have streams.

FSDP copies and reduces in streams of its own, while modules compute:

    gather stream   copy shards in, all_gather --+
    computation                                  +-- copy out, compute, copy gradients in --+
    reduce stream                                    reduce_scatter, divide, add to .grad --+

Collectives run after what the current stream has when they are called; `Work.wait` makes the
current stream wait. Between the streams:

    when                             which stream waits            for
    a step begins, `unshard`         gather                        the computation: it writes shards
    a module's parameters are used   computation (`Work.wait`)     its all_gather
    gradients were copied in         reduce                        the computation
    a reduction is finished          reduce (`Work.wait`)          its reduce_scatter
    backward ends, or hooks run      computation                   reduce

If shards are on the host (host_memory.py), the host waits, for events:

    a forward or a backward ends     host                          gather has copied shards in
    backward ends, or hooks run      host                          reduce has copied gradients out

*Memory.* An allocator gives freed memory to the next tensor of the stream that had allocated it,
without waiting for other streams. So memory is freed when its own stream waits for the stream that
uses it last:

    memory                           of stream      freed when
    flat shards, gathered shards     gather         gather waits for the copy-out (`retire`)
    flat gradients                   computation    computation waits for the reduce_scatter
    reduced gradients                reduce         reduce waits for the computation, each time

On the CPU there are no streams, and `side_streams` returns None.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from dure.comm.capture import in_fake_mode

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["SideStreams", "side_streams"]


class SideStreams:
    """The streams of one rank's device beside that of the computation (see the module's text).

    Threads:
        One at a time: that of forward, or that of backward.

    Args:
        device: Whose streams.
    """

    def __init__(self, device: torch.device) -> None:
        # Any: torch.cuda and modules like it
        self._device, self._module = device, torch.get_device_module(device)
        self._gather: Any = self._module.Stream(device)
        self._reduce: Any = self._module.Stream(device)
        self._retired: tuple[object, Any] | None = None
        self._copied: Any = None  # an event: after the last copy of shards from the host

    @property
    def _current(self) -> Any:
        return self._module.current_stream(self._device)

    # ---------------------------------------------------------------- gathering

    def gathering(self) -> AbstractContextManager[object]:
        """Return a block in which the gather stream is the current one."""
        return self._module.stream(self._gather)

    def gather_after_current(self) -> None:
        """Let the gather stream wait for the computation, which may have written shards."""
        self._gather.wait_stream(self._current)

    def begin_copies(self) -> None:
        """Note that the gather stream, which is current, copies shards from the host."""
        self._copied = self._gather.record_event()

    def finish_copies(self) -> None:
        """Block the host until the copies of shards from its memory are done."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def retire(self, memory: object) -> None:
        """Free memory of a gather, which the computation has just been given to copy out.

        Later: when the next one is copied out, or its module reshards. Until then the gather stream
        need not wait for this copy, and can copy in what is prefetched.
        """
        self.free_retired()
        self._retired = memory, self._current.record_event()

    def free_retired(self) -> None:
        """Free what was retired: the gather stream waits until it was copied out."""
        if self._retired is not None:
            self._gather.wait_event(self._retired[1])
            self._retired = None

    # ---------------------------------------------------------------- reducing

    def reducing(self) -> AbstractContextManager[object]:
        """Return a block in which the reduce stream is the current one."""
        return self._module.stream(self._reduce)

    def reduce_after_current(self) -> None:
        """Let the reduce stream wait for the computation, which has copied gradients in."""
        self._reduce.wait_stream(self._current)

    def reduced(self) -> Any:
        """Return an event after what the reduce stream has now."""
        return self._reduce.record_event()

    def wait_for(self, event: Any) -> None:
        """Let the computation wait for an event."""
        self._current.wait_event(event)

    def wait_for_reduced(self) -> None:
        """Let the computation wait for the reduce stream, which has written gradients."""
        self._current.wait_stream(self._reduce)


def side_streams(group: ProcessGroup, device: torch.device) -> SideStreams | None:
    """Return the streams of the rank's device; None if it has none, or tensors have no values.

    Args:
        group: Of the ranks that shard; models over one group share the streams.
        device: Of the unsharded parameters.
    """
    if device.type in ("cpu", "meta") or in_fake_mode():
        return None
    if not hasattr(torch.get_device_module(device), "current_stream"):
        return None
    streams: SideStreams | None = group.belongings.get(SideStreams)
    if streams is None:
        streams = group.belongings[SideStreams] = SideStreams(device)
    return streams
