"""The outside of a message, and who carries it.

An `Envelope` says what a message is, from whom, and what belongs to it; what it means is the
agent's (`agent`). A `Transport` carries envelopes between the processes of one job, with the memory
of the tensors in them: between processes of a host through rings and memory that changes hands,
between hosts through sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from math import inf
from typing import Any, Protocol

import msgspec
import torch

from dure.rpc.links import Numbered
from dure.rpc.memory import Memory
from dure.rpc.message import Body

__all__ = [
    "Completion",
    "Envelope",
    "GradientTag",
    "Kind",
    "Received",
    "Receiver",
    "Transport",
    "Waiter",
    "Work",
]

Work = Callable[..., None]
"""What a thread of a transport's runs; called with the error where there is no thread for it."""


class Completion(partial[None]):
    """Work that needs no slot: calls that have one may wait for what it brings."""


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
    """Says that tensors of a message are part of a distributed graph."""

    context: int
    message: tuple[int, int]  # its id in the context (`autograd.context.MessageId`)
    needing: int  # how many of the tensors need gradients; 0 only makes the context known
    what: str = ""  # the call, for people


class Envelope(msgspec.Struct, array_like=True):
    """A message."""

    kind: int
    sender: int
    number: int = 0  # of the call, given by who calls; an answer has the call's
    body: Body = Body()  # the values that it is about, or an exception (`failures`)
    memories: tuple[Memory, ...] = ()  # of the tensors in them; filled by the transport
    gradients: GradientTag | None = None
    make: tuple[int, int] | None = None  # the reference, or the backward pass (`Kind`)
    link: tuple[Numbered, ...] = ()  # what must arrive; rides along with any message
    devices: dict[str, str] | None = None  # where tensors of the callee's belong at the caller
    made: tuple[int, ...] = ()  # calls of the receiver's whose values have been made; rides along
    after: int = 0  # FETCH: the last message of the link that was sent before, which may come later


class Received(msgspec.Struct, eq=False):
    """A message that was received."""

    envelope: Envelope
    memories: Sequence[torch.Tensor] = ()
    references: Sequence[Any] = ()  # those of the body, as programs have them
    made: bool = True  # False: the value of a `MAKE` was given up, and the call must not run

    @classmethod
    def empty_answer(cls, sender: int) -> Received:
        """Return the answer None."""
        return cls(Envelope(Kind.ANSWER, sender))


class Waiter(Protocol):
    """Something that a thread waits for, and another thread brings."""

    @property
    def done(self) -> bool:
        """Whether it was brought."""
        ...


class Receiver(Protocol):
    """Who is told what comes: the agent."""

    def receive(self, envelope: Envelope, memories: Sequence[torch.Tensor]) -> Work | None:
        """Take a message, with its memories (uint8 [bytes] each, this process's own).

        Returns quickly; what it returns is the call to run: the transport has it run by a thread of
        its own, in order of arrival as far as there are free slots.
        """
        ...

    def broken(self, id: int) -> None:
        """A connection to a process broke, after all that came through it was told.

        Calls under way may have run, and answers may be lost.
        """
        ...

    def died(self, id: int, how: str) -> None:
        """A process is gone for good, once; all that came from it was told, or begins to be.

        `how` it ended: "exit code 3", "signal 9 (SIGKILL)", or empty.
        """
        ...

    def joined(self, id: int, name: str) -> None:
        """A process is there; told before anything comes from it, or a reference to its values."""
        ...


class Transport(Protocol):
    """Carries messages.

    Threads: all methods may be called from any thread.
    """

    def start(self, receiver: Receiver) -> None:
        """Begin to receive. Who is there, this process too, is told before this returns."""
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

    def wait(self, ticket: Waiter, seconds: float = inf) -> bool:
        """Wait for a ticket; False: the time is over, or all is (`close`).

        The thread receives messages meanwhile.

        What it receives that may run code of the program's is left to other threads, and a thread
        that runs a call gives its slot to another while it waits.
        """
        ...

    def submit(self, work: Work) -> None:
        """Have one of the transport's threads run something, as if it were a call."""
        ...

    def close(self, known: bool = False) -> None:
        """End: nothing is received any more; returns when no call runs, or soon.

        The others are told, unless it is `known` to all that this process ends now.
        """
        ...
