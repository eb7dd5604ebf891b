"""The outside of a message, and who carries it.

An `Envelope` says what a message is, from whom, and what belongs to it; what it means is the
agent's (`agent`). A `Transport` carries envelopes between the processes of one job, with the memory
of the tensors in them: between processes of a host through rings and memory that changes hands,
between hosts through sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol

import msgspec
import torch

from dure.errors import RpcError
from dure.rpc.links import Numbered
from dure.rpc.memory import Memory
from dure.rpc.message import Body

__all__ = ["Envelope", "GradientTag", "Kind", "Transport", "Waiter"]


class Kind(IntEnum):
    """What a message is."""

    CALL = 0  # a function, its arguments; the answer has the same number
    MAKE = 1  # the same, and the result stays there, under the reference `make`
    ANSWER = 2  # a value
    ERROR = 3  # an exception
    RELIABLE = 4  # only what `link` has: it must arrive (references, the end of a context)
    FETCH = 5  # the value of a reference is wanted: `RRef.to_here`
    GRADIENTS = 6  # of the backward pass `make`


class GradientTag(msgspec.Struct, array_like=True, frozen=True):
    """Says that tensors of a message are part of a distributed graph.

    Args:
        context: The context's number.
        message: The id of the message in it (`autograd.context.MessageId`).
        needing: How many of the tensors need gradients; 0 only makes the context known.
        what: The call, for people.
    """

    context: int
    message: tuple[int, int]
    needing: int
    what: str = ""


class Envelope(msgspec.Struct, array_like=True):
    """A message.

    Args:
        kind: What it is.
        sender: The sender's id.
        number: Of the call, given by who calls; an answer has the call's.
        body: The values that it is about, or an exception (`failures`).
        memories: Of the tensors in them; filled by the transport.
        gradients: What it means for a distributed backward pass.
        make: The reference to make (`Kind.MAKE`), to look up (`Kind.FETCH`), or the
            backward pass (`Kind.GRADIENTS`).
        link: What must arrive; rides along with any message.
        devices: Of a call, where tensors of the callee's devices belong at the caller.
        made: Calls of the receiver whose values have been made; rides along as `link` does.
    """

    kind: int
    sender: int
    number: int = 0
    body: Body = Body()
    memories: tuple[Memory, ...] = ()
    gradients: GradientTag | None = None
    make: tuple[int, int] | None = None
    link: tuple[Numbered, ...] = ()
    devices: dict[str, str] | None = None
    made: tuple[int, ...] = ()


class Waiter(Protocol):
    """Something that a thread waits for, and another thread brings."""

    @property
    def done(self) -> bool:
        """Whether it was brought."""
        ...


class Transport(Protocol):
    """Carries messages.

    Threads: all methods may be called from any thread.
    """

    def start(
        self,
        receive: Callable[[Envelope, Sequence[torch.Tensor]], Callable[[], None] | None],
        broken: Callable[[int], None],
        died: Callable[[int, str], None],
        refuse: Callable[[Callable[[], None], RpcError], None],
        joined: Callable[[int, str], None],
    ) -> None:
        """Begin to receive.

        Args:
            receive: Told of each message, with its memories (uint8 [bytes] each, this process's
                own), in the receiving thread; returns quickly. What it returns is the call to run:
                the transport has it run by a thread of its own, in order of arrival as far as there
                are free slots.
            broken: Told, after all that came through it, of a connection to a process that broke:
                calls under way may have run, and answers may be lost.
            died: Told once, after all that came from it, of a process that is gone for good, and
                how it ended ("exit code 3", "signal 9 (SIGKILL)", or empty).
            refuse: Told of a call, which `receive` returned, for which there is no thread.
            joined: Told of each process, before anything comes from it, or a reference to a value
                of it: its id and its name. Those that are there, this one too, are told before
                this returns.
        """
        ...

    def look(self, to: str | int) -> None:
        """Find out whether a process of that name, or id, has joined; then `joined` is told."""
        ...

    def send(self, to: int, envelope: Envelope, memories: Sequence[torch.Tensor]) -> None:
        """Send a message; the memories (contiguous) are copied, or sent, before this returns.

        Never waits for the receiver. A process may send to itself.

        Raises:
            PeerLost: The process is known to be gone.
        """
        ...

    def ticket(self) -> Waiter:
        """Return a new ticket."""
        ...

    def complete(self, ticket: Waiter) -> None:
        """Say that what a ticket stands for is there."""
        ...

    def wait(self, ticket: Waiter, seconds: float) -> bool:
        """Wait for a ticket; tell whether it is done. The thread receives messages meanwhile.

        A call that it receives is left to other threads, and a thread that runs a call gives its
        slot to another while it waits.
        """
        ...

    def submit(self, call: Callable[[], None]) -> None:
        """Have one of the transport's threads run something, as if it were a call."""
        ...

    def close(self) -> None:
        """End: nothing is received any more; returns when no call runs."""
        ...
