"""Hand-over between stages on different ranks, by messages.

A *transfer* is what one stage hands to its neighbour for one microbatch: outputs forward, gradients
backward; its SEND represents it. It is a *header* of two numbers and the tensors, each a message,
in order, under a tag of the transfer's own. Note "Expected layouts": the receiver makes room, and
posts its receives, before anything comes, if it knows what will come. It expects what the same
microbatch brought in the last step, if that step brought what the step before it did; else nothing.
Sender and receiver come to the same expectation without asking, as both know what was carried. The
header says what does come:

    header             under the transfer's tag       under the late tag
    the expected one   the tensors
    another one        fillers, if any were expected  its description if it is new; the tensors
    poison             fillers, if any were expected  a report of what failed

A description is sent once a wire: the header then names it by its number. So shapes may change from
microbatch to microbatch, at the price of receives that are posted when the header has come.

Note "Streams". NCCL runs the messages of two ranks in the order of their launches and ignores their
tags, and a message holds up those launched after it until both ends have launched it. So
activations that a rank sends would wait behind a receive of gradients that its peer sends later.
Where a backend does so, messages to higher ranks and to lower ranks are on different channels of
the group, and headers are CPU messages.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from dure.comm.work import Work
from dure.parallel.pipeline.failures import FailureReport, Poisoned
from dure.parallel.pipeline.layout import PackedPytree, PytreeLayout, TensorLayout
from dure.schedules import Action, Kind

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["FIRST_TAG", "Incoming", "StageTransfers"]

FIRST_TAG = 1 << 16
"""Above the tags that programs use; some MPIs have tags of 20 bits."""


@dataclass(slots=True)
class _Wire:
    """All transfers from one stage in one direction, as either end knows them.

    Attributes:
        layouts: By number.
        numbers: The numbers of those with given leaves.
        expected: The layout that each microbatch will have; empty: unknown.
        carried: Those that microbatches had in this step.
        before: Those of the last step.
    """

    layouts: list[PytreeLayout] = field(default_factory=list[PytreeLayout])
    numbers: dict[tuple[object, ...], list[int]] = field(
        default_factory=dict[tuple[object, ...], list[int]]
    )
    expected: dict[int, int] = field(default_factory=dict[int, int])
    carried: dict[int, int] = field(default_factory=dict[int, int])
    before: dict[int, int] | None = None

    def number(self, layout: PytreeLayout) -> int | None:
        """Return the number of a layout that was sent before."""
        for number in self.numbers.get(layout.leaves, ()):
            if self.layouts[number].tree == layout.tree:
                return number
        return None

    def learn(self, layout: PytreeLayout) -> int:
        """Give a new layout a number."""
        number = len(self.layouts)
        self.layouts.append(layout)
        self.numbers.setdefault(layout.leaves, []).append(number)
        return number

    def expect(self, microbatch: int) -> list[TensorLayout]:
        """Return the tensors that a microbatch is expected to have."""
        number = self.expected.get(microbatch)
        return [] if number is None else self.layouts[number].tensors

    def end_step(self) -> None:
        """Choose what to expect of the next step."""
        steady = self.carried == self.before
        if self.before is None:
            steady = len(set(self.carried.values())) == 1
        self.expected = dict(self.carried) if steady else {}
        self.before, self.carried = self.carried, {}


@dataclass(slots=True)
class Incoming:
    """What was posted of a transfer, and has come: a `take` that was interrupted is taken up again.

    Attributes:
        header: Its numbers.
        works: The receives of the header and of the tensors that are expected.
        room: These tensors.
        description: Bytes of a description, or of a report; and their receive.
        late: The tensors that were not expected, and their receives.
    """

    header: torch.Tensor
    works: list[Work] = field(default_factory=list[Work])
    room: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    description: tuple[torch.Tensor, Work] | None = None
    late: list[tuple[torch.Tensor, Work]] = field(default_factory=list[tuple[torch.Tensor, Work]])


class StageTransfers:
    """The transfers of one rank with ranks of its group.

    Threads:
        One.

    Args:
        group: The ranks of the pipeline.
        placement: The rank of each stage.
        microbatches: How many a step has.
        device: Where received tensors lie.

    Attributes:
        header_device: Where numbers lie that the group moves.
    """

    POISON = -1
    """In a header in place of a layout's number."""

    def __init__(
        self,
        group: ProcessGroup,
        placement: Sequence[int],
        microbatches: int,
        device: torch.device,
    ) -> None:
        self._placement, self._microbatches = placement, microbatches
        # Note "Streams" in the text of this module.
        in_stream = group.orders_by_stream(device.type)
        self._group, self._down = group, group.channel(1) if in_stream else group
        self._device = device
        self.header_device = torch.device("cpu") if "cpu" in group.device_types else device
        self._wires: dict[tuple[int, Kind, bool], _Wire] = {}
        self._used: set[tuple[int, Kind, bool]] = set()
        self._posted: dict[Action, Incoming] = {}
        self._sends: deque[tuple[Work, torch.Tensor]] = deque()
        self._training = False

    def begin(self, training: bool) -> None:
        """Begin a step; those without backward have layouts of their own."""
        self._training = training

    def _wire(self, transfer: Action) -> _Wire:
        key = (transfer.stage, transfer.kind, self._training)
        self._used.add(key)
        return self._wires.setdefault(key, _Wire())

    def _tag(self, transfer: Action) -> int:
        line = transfer.stage * 2 + (transfer.kind is Kind.SEND_F)
        return FIRST_TAG + 2 * (line * self._microbatches + _microbatch(transfer))

    def _between(self, sender: int, receiver: int) -> ProcessGroup:
        """Return the channel for messages of one rank to another."""
        return self._group if sender < receiver else self._down

    def _receiver(self, transfer: Action) -> int:
        return self._placement[transfer.other_end.stage]

    # ---------------------------------------------------------------- sending

    def send(self, transfer: Action, packed: PackedPytree) -> None:
        """Hand over a pytree, whose tensors are not written to any more."""
        layout, wire = packed.layout, self._wire(transfer)
        number = wire.number(layout)
        description: bytes = b""
        if number is None:
            description = pickle.dumps(layout)  # which fails before anything is sent, or not at all
            number = wire.learn(layout)
        wire.carried[_microbatch(transfer)] = number
        self._deliver(transfer, number, description, packed)

    def _deliver(self, transfer: Action, number: int, data: bytes, packed: PackedPytree) -> None:
        tag, to, wire = self._tag(transfer), self._receiver(transfer), self._wire(transfer)
        self._send(torch.tensor([number, len(data)], device=self.header_device), to, tag)
        if wire.expected.get(_microbatch(transfer)) != number:
            self._send_fillers(wire, transfer, to)
            tag += 1
            self._send_bytes(data, to, tag)
        for tensor in packed.tensors:
            self._send(tensor.contiguous(), to, tag)

    def send_poison(self, transfer: Action, report: FailureReport) -> None:
        """Tell the receiver that there will be no value, and why."""
        self._deliver_poison(transfer, pickle.dumps(report))

    def _deliver_poison(self, transfer: Action, data: bytes) -> None:
        to, tag = self._receiver(transfer), self._tag(transfer)
        self._send(torch.tensor([self.POISON, len(data)], device=self.header_device), to, tag)
        self._send_fillers(self._wire(transfer), transfer, to)
        self._send_bytes(data, to, tag + 1)

    def _send_fillers(self, wire: _Wire, transfer: Action, to: int) -> None:
        for layout in wire.expect(_microbatch(transfer)):
            filler = torch.zeros(layout.shape, dtype=layout.dtype, device=self._device)
            self._send(filler, to, self._tag(transfer))

    def _send_bytes(self, data: bytes, to: int, tag: int) -> None:
        if data:
            message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._send(message.to(self.header_device), to, tag)

    def _send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        work = self._between(self._group.rank(), to).send(tensor, to, tag, async_op=True)
        assert work is not None
        self._sends.append((work, tensor))

    def release_completed(self) -> None:
        """Release tensors whose sends have ended."""
        while self._sends and self._sends[0][0].is_completed():
            self._sends.popleft()[0].wait()

    # ---------------------------------------------------------------- receiving

    def post(self, transfer: Action) -> None:
        """Post the receives of a transfer."""
        tag, source = self._tag(transfer), self._placement[transfer.stage]
        header = torch.empty(2, dtype=torch.int64, device=self.header_device)
        room = [t.empty(self._device) for t in self._wire(transfer).expect(_microbatch(transfer))]
        works = [self._receive(tensor, source, tag) for tensor in (header, *room)]
        self._posted[transfer] = Incoming(header, works, room)

    def _receive(self, tensor: torch.Tensor, source: int, tag: int) -> Work:
        return self._between(source, self._group.rank()).irecv(tensor, source, tag)

    def take(self, transfer: Action) -> PackedPytree:
        """Wait for a transfer whose receives were posted; return what came.

        Raises:
            Poisoned: There is no value.
            CommError: The sender died, or did not send in time.
        """
        incoming, wire = self._posted[transfer], self._wire(transfer)
        for work in incoming.works:
            work.wait()
        number, nbytes = incoming.header.tolist()
        layout = self._announced_layout(transfer, number, nbytes)
        tensors = incoming.room
        if wire.expected.get(_microbatch(transfer)) != number:
            tag, source = self._tag(transfer) + 1, self._placement[transfer.stage]
            for each in layout.tensors[len(incoming.late) :]:
                tensor = each.empty(self._device)
                incoming.late.append((tensor, self._receive(tensor, source, tag)))
            for _, work in incoming.late:
                work.wait()
            tensors = [tensor for tensor, _ in incoming.late]
        del self._posted[transfer]
        return PackedPytree(layout, tensors)

    def _announced_layout(self, transfer: Action, number: int, nbytes: int) -> PytreeLayout:
        """Return the layout that a header names; learn it, if its description follows."""
        wire = self._wire(transfer)
        described = self._described(transfer, nbytes) if nbytes else None
        if number == self.POISON:
            assert isinstance(described, FailureReport)
            del self._posted[transfer]
            raise Poisoned(described)
        if described is not None and number == len(wire.layouts):
            wire.learn(described)
        wire.carried[_microbatch(transfer)] = number
        return wire.layouts[number]

    def _described(self, transfer: Action, nbytes: int) -> Any:
        """Return the description or report that follows a header."""
        incoming = self._posted[transfer]
        if incoming.description is None:
            data = torch.empty(nbytes, dtype=torch.uint8, device=self.header_device)
            source, tag = self._placement[transfer.stage], self._tag(transfer) + 1
            incoming.description = data, self._receive(data, source, tag)
        data, work = incoming.description
        work.wait()
        return pickle.loads(data.cpu().numpy().tobytes())

    # ---------------------------------------------------------------- a step's end

    def finish(self) -> None:
        """End a step: all that was sent has arrived, or is about to."""
        while self._sends:
            self._sends.popleft()[0].wait()
        for key in self._used:
            self._wires[key].end_step()
        self._used.clear()

    def drain(self) -> None:
        """Receive what is still to come of a step that failed: both ends know the same again."""
        for transfer in list(self._posted):
            with suppress(Poisoned):
                self.take(transfer)
        self.finish()

    def abandon(self) -> None:
        """Forget what is under way: the group is broken."""
        for incoming in self._posted.values():
            later = [] if incoming.description is None else [incoming.description]
            for work in (*incoming.works, *(work for _, work in (*later, *incoming.late))):
                work.disown()
        for work, _ in self._sends:
            work.disown()
        self._posted.clear()
        self._sends.clear()


def _microbatch(transfer: Action) -> int:
    assert transfer.microbatch is not None
    return transfer.microbatch
