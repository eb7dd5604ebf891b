"""What `torch.get_device_module("sim")` returns: the part of `torch.cuda` that programs use."""

# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dure.testing.accelerator import streams
from dure.testing.accelerator.memory import NAME
from dure.testing.accelerator.operators import GENERATOR
from dure.testing.accelerator.streams import Event, Stream

__all__ = ["DeviceModule"]


class DeviceModule:
    """One device of its type; its functions are those of `torch.cuda`."""

    Stream, Event = Stream, Event

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: object) -> None:
        """Do nothing: there is one device."""

    @contextmanager
    def device(self, device: object) -> Iterator[None]:
        yield

    def current_stream(self, device: object = None) -> Stream:
        return streams.current_stream()

    def default_stream(self, device: object = None) -> Stream:
        return streams.default_stream()

    def set_stream(self, stream: Stream) -> None:
        streams.use_stream(stream)

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        with stream or streams.current_stream():
            yield

    def synchronize(self, device: object = None) -> None:
        """Block the host until all streams' work has run."""
        streams.synchronize_all()

    def manual_seed(self, seed: int) -> None:
        GENERATOR.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: object = NAME) -> torch.Tensor:
        return GENERATOR.get_state()

    def set_rng_state(self, state: torch.Tensor, device: object = NAME) -> None:
        GENERATOR.set_state(state)

    def get_amp_supported_dtype(self) -> list[Any]:
        return [torch.bfloat16, torch.float16]
