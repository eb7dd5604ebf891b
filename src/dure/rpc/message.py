"""The messages of RPC.

An `RpcMessage` contains what the callee or caller needs; the agent interprets it (`agent`). The
transport carries messages between the processes of one job, with the memory of their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any

import msgspec
import torch

from dure.rpc.codec import Body
from dure.rpc.memory import MemoryRow

__all__ = [
    "ANSWER",
    "CALL",
    "ERROR",
    "FETCH",
    "GRADIENTS",
    "MAKE",
    "REPORT",
    "Completion",
    "FutureCompletion",
    "GradientTag",
    "MessageType",
    "Numbered",
    "PassTag",
    "Received",
    "RpcMessage",
    "Work",
]

Work = Callable[[], None]
"""Work for a thread of the transport."""


class Completion(partial[None]):
    """Work that needs no slot, because calls that have one may wait for it."""


class FutureCompletion(Completion):
    """Completes a future without callbacks, as the thread that waits for it can do by itself."""


class MessageType(IntEnum):
    """The types of messages."""

    CALL = 0  # a function and its arguments; the answer has the same number
    MAKE = 1  # the same, but the result is kept by the callee as the value of `make`
    ANSWER = 2  # a value
    ERROR = 3  # an exception
    REPORT = 4  # contains only `link`
    FETCH = 5  # asks for the value of a reference: `RRef.to_here`
    GRADIENTS = 6  # of a backward pass


CALL, MAKE, ANSWER, ERROR, REPORT, FETCH, GRADIENTS = MessageType
"""The types, without a look at the class, which takes 60 ns each time."""


class GradientTag(msgspec.Struct, array_like=True, frozen=True):
    """Marks a message whose tensors are part of a distributed graph."""

    context: int
    message: tuple[int, int]  # its id in the context (`autograd.backward.MessageId`)
    needing: int  # how many of the tensors need gradients; if 0, only the context is announced
    what: str = ""  # the call, for error messages


class PassTag(msgspec.Struct, array_like=True, frozen=True):
    """Marks a message with gradients of a backward pass, its values."""

    backward: tuple[int, int]  # the pass (`autograd.backward.PassId`)
    context: int
    message: tuple[int, int]  # whose tensors the gradients are for (`autograd.backward.MessageId`)
    retain_graph: bool
    share: int  # of the credit
    awaited: int


class Numbered(msgspec.Struct, array_like=True, frozen=True):
    """A report: a message that is delivered in the order of the numbers (`directory`)."""

    number: int
    body: bytes


class RpcMessage(msgspec.Struct, array_like=True):
    """A message."""

    kind: int
    sender: int
    number: int = 0  # of the call, chosen by the caller; an answer has the same
    body: Body = Body()  # values, or an exception (`failures`)
    memories: tuple[MemoryRow, ...] = ()  # of the tensors; set by the transport
    gradients: GradientTag | None = None
    make: tuple[int, int] | None = None  # the reference that is made or fetched
    link: tuple[Numbered, ...] = ()  # reports in order, which travel with any other message
    devices: dict[str, str] | None = None  # for each device of the callee, the caller's
    backward: PassTag | None = None


class Received(msgspec.Struct, eq=False):
    """A message that was received."""

    message: RpcMessage
    memories: Sequence[torch.Tensor] = ()
    references: Sequence[Any] = ()  # the `RRef`s of the body
