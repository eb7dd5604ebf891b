"""NCCL on the simulated accelerator: what `ProcessGroupNCCL` does, as far as Dure's engine asks it.

Like torch's class:

* A group's operations run in a stream of its own, after what the current stream has at the call.
  `Work.wait` makes the *current* stream wait, and does not block the host.
* A single `send` or `recv` runs in the stream of a communicator of these two ranks, in the order of
  the calls, and ends when both sides have started it. A group call (`_start_coalescing`) is one
  launch on the group's communicator.
* The first operation of a communicator blocks the host until all its ranks have called one.
* A work keeps its tensors until it was waited for, or has ended.
* A communicator is split off another if all its ranks call, each with a color or without one, while
  no operation of it is under way.
* Reductions of 16-bit floats are rounded at every step; there are no bit operations.

Unlike it, launches that cannot end are errors (communicator.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch

from dure.comm.backends.base import BackendOptions
from dure.comm.backends.engine.group import EngineGroup
from dure.comm.backends.torch_engine import ENGINE_OPS, connect_nccl
from dure.errors import StoreTimeout
from dure.testing.accelerator import streams
from dure.testing.accelerator.communicator import Communicator, PendingOperation
from dure.testing.accelerator.memory import NAME, on_host

__all__ = ["BACKEND", "SimulatedNCCL", "create_simulated_nccl"]

BACKEND = "simulated_nccl"
"""The name that programs pass to `init_process_group`."""
_POLLS = 3
"""A program that asks so often whether a work has ended waits for it: then the work runs."""
_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


class SimulatedWork:
    """A launch, as torch's `Work`.

    Args:
        communicator: Of the launch.
        event: Recorded after it.
        tensors: To keep until it was waited for.
    """

    def __init__(self, communicator: Communicator, event: Any, tensors: Sequence[Any]) -> None:
        self._communicator, self._event = communicator, event
        self._kept, self._num_asked = [*tensors], 0

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait."""
        self._communicator.check()
        self._event.wait()
        self._kept.clear()
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        """Return whether it has ended; asked again and again, it ends as soon as it can."""
        self._num_asked += 1
        if self._num_asked >= _POLLS:
            self._event.advance()
        return self._has_ended()

    def _has_ended(self) -> bool:
        ended = self._event.query() or self._communicator.error is not None
        if ended:
            self._kept.clear()
        return ended

    def is_success(self) -> bool:
        """Return whether it has ended without an error."""
        return self._event.query() and self._communicator.error is None

    def exception(self) -> BaseException | None:
        """Return the communicator's error."""
        return self._communicator.error

    def has_ended_of(self, communicator: Communicator) -> bool:
        """Return whether it has ended, or is of another communicator."""
        return communicator is not self._communicator or self._has_ended()

    def drop_if_ended(self) -> bool:
        """Release the tensors of a work that has ended; return whether it has."""
        return self._has_ended()


class SimulatedNCCL:
    """One rank's part of a group, with the methods of `ProcessGroupNCCL` that Dure calls.

    Args:
        store: Of the group.
        rank: This rank.
        size: Ranks of the group.
        options: With the group's timeout.
    """

    class Options:
        """The options of a group."""

        _timeout = timedelta(minutes=10)
        group_name = ""
        split_from: SimulatedNCCL | None = None
        split_color = 0

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._timeout, self._name = options._timeout, options.group_name  # pyright: ignore
        self._options, self._num_splits = options, 0
        self._communicators: dict[str, Communicator] = {}
        self._grouped: list[tuple[PendingOperation, Sequence[torch.Tensor]]] | None = None
        self._in_flight: list[SimulatedWork] = []

    # ---------------------------------------------------------------- collectives

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any = None) -> SimulatedWork:
        """Reduce in place."""
        (tensor,) = tensors
        op = "SUM" if options is None else _name_of(options.reduceOp)
        there = on_host(tensor)
        return self._collective(
            f"all_reduce ({op})",
            tensor,
            lambda values: there.copy_(_reduced(self._ordered(values), op, there)),
        )

    def reduce(self, tensors: Sequence[torch.Tensor], options: Any) -> SimulatedWork:
        """Reduce to the root's tensor."""
        (tensor,) = tensors
        op, root, there = _name_of(options.reduceOp), options.rootRank, on_host(tensor)

        def finish(values: dict[int, bytes]) -> None:
            if self._rank == root:
                there.copy_(_reduced(self._ordered(values), op, there))

        return self._collective(f"reduce ({op}) to {root}", tensor, finish)

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> SimulatedWork:
        """Copy the root's tensor to all."""
        (tensor,) = tensors
        root, there = options.rootRank, on_host(tensor)
        return self._collective(
            f"broadcast from {root}",
            tensor,
            lambda values: there.copy_(_read(values[root], there)),
            sends=self._rank == root,
        )

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor) -> SimulatedWork:
        there = on_host(output)

        def finish(values: dict[int, bytes]) -> None:
            there.copy_(_read(b"".join(self._ordered(values)), there))

        return self._collective("all_gather", tensor, finish, output)

    def _reduce_scatter_base(
        self, output: torch.Tensor, tensor: torch.Tensor, options: Any
    ) -> SimulatedWork:
        op, there = _name_of(options.reduceOp), on_host(output)
        begin, end = self._rank * output.nbytes, (self._rank + 1) * output.nbytes

        def finish(values: dict[int, bytes]) -> None:
            parts = [each[begin:end] for each in self._ordered(values)]
            there.copy_(_reduced(parts, op, there))

        return self._collective(f"reduce_scatter ({op})", tensor, finish, output)

    def alltoall_base(
        self, output: torch.Tensor, tensor: torch.Tensor, takes: list[int], gives: list[int]
    ) -> SimulatedWork:
        """Send a part to each rank; as NCCL's, messages of a group call."""
        gives = gives or [tensor.numel() // self._size] * self._size
        takes = takes or [output.numel() // self._size] * self._size
        sent, received = tensor.split(gives), output.split(takes)
        own_sent, own_received = on_host(sent[self._rank]), on_host(received[self._rank])
        operations = [
            self._message(kind, part, peer, "all_to_all")
            for kind, parts in (("send", sent), ("recv", received))
            for peer, part in enumerate(parts)
            if peer != self._rank and part.numel()
        ]
        keep = lambda values: own_received.copy_(own_sent)  # noqa: E731
        copy = PendingOperation(
            "collective", -1, "all_to_all", f"all_to_all {tensor.dtype}", (), keep
        )
        return self._launch([copy, *operations], (output, tensor))

    def _collective(
        self,
        name: str,
        tensor: torch.Tensor,
        finish: Callable[[dict[int, bytes]], object],
        output: torch.Tensor | None = None,
        sends: bool = True,
    ) -> SimulatedWork:
        form = f"{name} of {tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"
        reads = (on_host(tensor),) if sends else ()
        operation = PendingOperation("collective", -1, form, form, reads, finish)
        return self._launch([operation], (tensor,) if output is None else (tensor, output))

    def _ordered(self, values: dict[int, bytes]) -> list[bytes]:
        return [values[rank] for rank in range(self._size)]

    # ---------------------------------------------------------------- messages

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int) -> SimulatedWork:
        """Send to `dst`; tags have no effect, as over NCCL."""
        return self._send_or_receive("send", tensors[0], dst)

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int) -> SimulatedWork:
        """Receive from `src`."""
        return self._send_or_receive("recv", tensors[0], src)

    def _send_or_receive(self, kind: str, tensor: torch.Tensor, peer: int) -> SimulatedWork:
        return self._launch([self._message(kind, tensor, peer)], (tensor,), peer)

    def _message(
        self, kind: str, tensor: torch.Tensor, peer: int, of: str = ""
    ) -> PendingOperation:
        there, numel = on_host(tensor), tensor.numel()
        dtype = str(tensor.dtype).removeprefix("torch.")
        text = f"{kind} of {numel} {dtype} {'to' if kind == 'send' else 'from'} rank {peer}"

        def finish(values: dict[int, bytes]) -> None:
            if kind == "recv":
                there.copy_(_read(values[peer], there))

        reads = (there,) if kind == "send" else ()
        form = f"{of} message of {numel} {dtype}"
        return PendingOperation(kind, peer, f"{of} {text}".lstrip(), form, reads, finish)

    def _start_coalescing(self) -> None:
        self._grouped = []

    def _end_coalescing(self) -> SimulatedWork | None:
        grouped, self._grouped = self._grouped, None
        if not grouped:
            return None
        kept = [tensor for _, tensors in grouped for tensor in tensors]
        return self._launch([operation for operation, _ in grouped], kept)

    # ---------------------------------------------------------------- communicators

    def _launch(
        self,
        operations: Sequence[PendingOperation],
        tensors: Sequence[torch.Tensor],
        peer: int | None = None,
    ) -> SimulatedWork:
        if self._grouped is not None:  # its own work waits for nothing, as torch's
            self._grouped.extend((operation, tensors) for operation in operations)
            return SimulatedWork(self._communicator(None, ""), streams.Event(), ())
        self._in_flight = [work for work in self._in_flight if not work.drop_if_ended()]
        communicator = self._communicator(peer, operations[0].text)
        work = SimulatedWork(communicator, communicator.launch(operations), tensors)
        self._in_flight.append(work)
        return work

    def _communicator(self, peer: int | None, op: str) -> Communicator:
        """Return that of the group, or of this rank and `peer`; make it at its first operation."""
        if peer is None:
            key, ranks = "all", [*range(self._size)]
        else:
            ranks = sorted((self._rank, peer))
            key = "{}:{}".format(*ranks)
        made = self._communicators.get(key)
        if made is None:
            if peer is None:
                self._be_split_off()
            made = self._communicators[key] = Communicator(
                self._store, key, ranks, self._rank, self._timeout, self._name, self._size
            )
            made.create(op)
        return made

    # ---------------------------------------------------------------- splitting

    supports_splitting = True
    num_bootstraps = 0
    """Communicators of groups of this process that were not split off another one's."""

    def comm_split_count(self) -> int:
        """Return how often this rank has taken part in a split of the communicator."""
        return self._num_splits

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Take part in a split, as a rank of no new communicator."""
        self._take_part(0, self._rank)

    def _be_split_off(self) -> None:
        """Split the communicator that is about to be made off another one's, if that was asked."""
        parent = self._options.split_from
        if parent is None:
            SimulatedNCCL.num_bootstraps += 1
            return
        ranks = parent._take_part(self._options.split_color, self._rank)
        if len(ranks) != self._size or ranks[self._rank] != parent._rank:
            raise RuntimeError(f"the split made a communicator of ranks {ranks} of its parent")

    def _take_part(self, color: int, place: int) -> list[int]:
        """Wait until all ranks have passed a color; return those that have passed this one.

        Args:
            color: 0 for none.
            place: Orders the ranks of one color.

        Raises:
            RuntimeError: Where NCCL would wait forever, or may.
        """
        made = self._communicators.get("all")
        if made is None:
            raise RuntimeError("a communicator is split that does not exist")
        if not all(work.has_ended_of(made) for work in self._in_flight):
            raise RuntimeError("a communicator is split while operations of it are under way")
        keys = [f"split/{self._num_splits}/{rank}" for rank in range(self._size)]
        self._num_splits += 1
        self._store.set(keys[self._rank], f"{color} {place}")
        try:
            self._store.wait(keys, self._timeout)
        except StoreTimeout as error:
            raise RuntimeError(f"not all ranks take part in the split: {error}") from None
        passed = [self._store.get(key).split() for key in keys]
        places = {r: int(each[1]) for r, each in enumerate(passed) if int(each[0]) == color}
        return sorted(places, key=places.__getitem__)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        for communicator in self._communicators.values():
            communicator.timeout = timeout

    def shutdown(self) -> None:
        """Wait for all that was launched, and leave."""
        with ExitStack() as stack:  # all of them, also after an error
            for communicator in self._communicators.values():
                stack.callback(communicator.close)

    def abort(self) -> None:
        """Leave; operations that have not ended fail."""
        for communicator in self._communicators.values():
            communicator.abort()


def create_simulated_nccl(options: BackendOptions) -> EngineGroup:
    """Make this rank's part of a group; every rank of it is a process of its own."""
    settings = SimulatedNCCL.Options()
    settings.group_name = options.name
    return connect_nccl(SimulatedNCCL, settings, options, BACKEND, NAME)


def _name_of(op: Any) -> str:
    """Return the name of a reduction.

    Raises:
        RuntimeError: NCCL has no such reduction.
    """
    for name in _REDUCTIONS:
        if op == ENGINE_OPS[name]:
            return name
    raise RuntimeError(f"NCCL has no reduction {op}")


def _read(values: bytes, like: torch.Tensor) -> torch.Tensor:
    """Return bytes as a tensor of the dtype and shape of `like`."""
    if not like.numel():
        return torch.empty_like(like)
    flat = torch.frombuffer(bytearray(values), dtype=torch.uint8)
    return flat.view(like.dtype).view(like.shape)


def _reduced(parts: Sequence[bytes], op: str, like: torch.Tensor) -> torch.Tensor:
    """Reduce all ranks' values, in the order of ranks, in their dtype."""
    first, *others = (_read(part, like) for part in parts)
    for other in others:
        first = _REDUCTIONS[op](first, other)
    if op == "AVG":
        first = first.div(len(parts)).to(like.dtype)
    return first
