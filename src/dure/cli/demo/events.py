"""What a training rank tells the demo while it runs: one JSON object a line, on its output.

A line that is not such an object is ordinary output and is shown as it is. Times are seconds.
"""

from __future__ import annotations

import msgspec

PHASES = ("data wait", "forward", "backward", "exposed communication", "optimizer", "other")
"""Where the time of a step goes. Exposed communication is the wait for other ranks' gradients; what
backward hides is not in it."""


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
    """A rank has taken a step; `loss` is the mean over its part of the batch.

    `phases` are the seconds of each of `PHASES`, which add up to the step.
    """

    step: int
    loss: float
    phases: dict[str, float]


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


def encode(event: Event) -> str:
    return msgspec.json.encode(event).decode()


def decode(line: str) -> Event | None:
    """Return the event a line stands for; None for ordinary output."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeError):
        return None
