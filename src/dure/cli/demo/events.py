"""What a training rank tells the demo while it runs: one JSON object a line, on its output.

A line that is not such an object is ordinary output and is shown as it is. Times are seconds.
"""

from __future__ import annotations

import msgspec

__all__ = ["EpochEnd", "Event", "Memory", "Phases", "Start", "Step", "decode", "encode"]


class Phases(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one step went, in seconds; the fields add up to the step.

    Attributes:
        data: Waiting for the batch.
        forward: Model and loss.
        backward: Gradients, without the wait below.
        communication: Waiting for gradients of other ranks; what backward hides is not in it.
        optimizer: Updating the parameters.
        other: The rest.
    """

    data: float
    forward: float
    backward: float
    communication: float
    optimizer: float
    other: float = 0.0

    @property
    def total(self) -> float:
        """The whole step."""
        return sum(getattr(self, name) for name in self.__struct_fields__)


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start", tag_field="dure_demo"):
    """A rank is about to take its first step."""

    data: str
    train_images: int
    test_images: int
    image_shape: tuple[int, int]
    parameters: int
    backend: str
    steps: int
    steps_per_epoch: int
    torch_version: str


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="dure_demo"):
    """A rank has taken a step; `loss` is the mean over its part of the batch."""

    step: int
    loss: float
    phases: Phases


class EpochEnd(msgspec.Struct, frozen=True, kw_only=True, tag="epoch", tag_field="dure_demo"):
    """An epoch is over; `accuracy` is that of all ranks over the whole test split, from 0 to 1."""

    epoch: int
    accuracy: float


class Memory(msgspec.Struct, frozen=True, kw_only=True, tag="memory", tag_field="dure_demo"):
    """A rank's share of memory, in bytes, beyond what it had before there was a model.

    Of pages that ranks share each has its part (Linux calls it PSS).
    """

    nbytes: int


Event = Start | Step | EpochEnd | Memory

_decoder = msgspec.json.Decoder(Event)
_MARK = '{"dure_demo":'


def encode(event: Event) -> str:
    """Return the line that stands for `event`."""
    return msgspec.json.encode(event).decode()


def decode(line: str) -> Event | None:
    """Return the event a line stands for; None for ordinary output."""
    if not line.startswith(_MARK):
        return None
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
