"""The messages of RPC, and the interface of the transport that carries them.

An `RpcMessage` contains what the callee or caller needs; the agent interprets it (`agent`). A
`Transport` carries messages between the processes of one job, with the memory of their tensors:
within a host through rings and shared memory, between hosts through sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from math import inf
from typing import Any, Protocol

import msgspec
import torch

from dure.rpc.codec import Body
from dure.rpc.links import Numbered
from dure.rpc.memory import MemoryRow

__all__ = [
    "Completion",
    "GradientTag",
    "MessageType",
    "Received",
    "Receiver",
    "RpcMessage",
    "Transport",
    "Waiter",
    "Work",
]

Work = Callable[..., None]
"""Work for a thread of the transport; called with an error if there is no thread to run a call."""


class Completion(partial[None]):
    """Work that needs no slot, because calls that have one may wait for it."""


class MessageType(IntEnum):
    """The types of messages."""

    CALL = 0  # a function and its arguments; the answer has the same number
    MAKE = 1  # the same, but the result is kept by the callee as the value of `make`
    ANSWER = 2  # a value
    ERROR = 3  # an exception
    RELIABLE = 4  # contains only `link`
    FETCH = 5  # asks for the value of a reference: `RRef.to_here`
    GRADIENTS = 6  # of the backward pass `make`


class GradientTag(msgspec.Struct, array_like=True, frozen=True):
    """Marks a message whose tensors are part of a distributed graph."""

    context: int
    message: tuple[int, int]  # its id in the context (`autograd.backward.MessageId`)
    needing: int  # how many of the tensors need gradients; if 0, only the context is announced
    what: str = ""  # the call, for error messages


class RpcMessage(msgspec.Struct, array_like=True):
    """A message."""

    kind: int
    sender: int
    number: int = 0  # of the call, chosen by the caller; an answer has the same
    body: Body = Body()  # values, or an exception (`failures`)
    memories: tuple[MemoryRow, ...] = ()  # of the tensors; set by the transport
    gradients: GradientTag | None = None
    make: tuple[int, int] | None = None  # the reference, or the backward pass (`MessageType`)
    link: tuple[Numbered, ...] = ()  # reliable messages, which travel with any other
    devices: dict[str, str] | None = None  # for each device of the callee, the caller's
    made: tuple[int, ...] = ()  # the receiver's MAKE calls that have succeeded
    after: int = 0  # FETCH: the last reliable message sent before; it may arrive later


class Received(msgspec.Struct, eq=False):
    """A message that was received."""

    message: RpcMessage
    memories: Sequence[torch.Tensor] = ()
    references: Sequence[Any] = ()  # the `RRef`s of the body
    made: bool = True  # False: a MAKE call that was given up, and must not run

    @classmethod
    def empty_answer(cls, sender: int) -> Received:
        """Return the answer None."""
        return cls(RpcMessage(MessageType.ANSWER, sender))


class Waiter(Protocol):
    """An event that a thread waits for, and another thread sets."""

    @property
    def done(self) -> bool:
        """Whether it was set."""
        ...


class Receiver(Protocol):
    """Receives messages and events of a transport: the agent. Its methods return quickly."""

    def receive(self, message: RpcMessage, memories: Sequence[torch.Tensor]) -> Work | None:
        """Receive a message, with its memories (uint8 [bytes] each, owned by this process).

        Returns the call to run, if any. The transport runs calls in order of arrival, as far as
        there are free slots.
        """
        ...

    def broken(self, id: int) -> None:
        """Handle that a connection to a process broke; all that came through it was received.

        Calls under way may have run, and answers may be lost.
        """
        ...

    def died(self, id: int, how: str) -> None:
        """Handle that a process is gone for good; called once, after its last message.

        Args:
            id: The process.
            how: How it ended: "exit code 3", "signal 9 (SIGKILL)", or empty.
        """
        ...

    def joined(self, id: int, name: str) -> None:
        """Handle that a process has joined; called before anything else about it."""
        ...


class Transport(Protocol):
    """Carries messages.

    Threads: all methods may be called from any thread.
    """

    def start(self, receiver: Receiver) -> None:
        """Start to receive; `joined` is called for all known processes before this returns."""
        ...

    def look(self, to: str | int) -> None:
        """Check whether a process of that name or id has joined; if so, `joined` is called."""
        ...

    def send(self, to: int, message: RpcMessage, memories: Sequence[torch.Tensor]) -> None:
        """Send a message; the memories (contiguous) are copied before this returns.

        Never waits for the receiver. A process may send to itself.

        Raises:
            PeerLost: The process is known to be gone.
        """
        ...

    def ticket(self) -> Waiter:
        """Return a new event."""
        ...

    def complete(self, ticket: Waiter) -> None:
        """Set an event."""
        ...

    def wait(self, ticket: Waiter, seconds: float = inf) -> bool:
        """Wait for an event, and receive messages in that time.

        Code of the program is left to other threads, and a thread that runs a call gives its slot
        to another call while it waits.

        Returns:
            Whether the event was set; False after `seconds`, or if the transport was closed.
        """
        ...

    def submit(self, work: Work) -> None:
        """Run work in one of the transport's threads, as if it were a call."""
        ...

    def close(self, known: bool = False) -> None:
        """Stop receiving; returns when no call runs, or soon after.

        Args:
            known: Whether all others know that this process ends, so that it need not notify them.
        """
        ...
