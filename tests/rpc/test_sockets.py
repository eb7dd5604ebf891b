"""Frames of messages: what was cut is put together again, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dure.rpc.sockets import Assembly, Sockets, frames_of
from dure.store.wire import MAX_FRAME_BYTES


def some(nbytes: int) -> bytes:
    return bytes(i * 37 % 251 for i in range(nbytes))


@pytest.mark.parametrize("body", [0, 1, MAX_FRAME_BYTES - 20, MAX_FRAME_BYTES, 200_001])
@pytest.mark.parametrize(
    "memories", [[], [0], [5000], [MAX_FRAME_BYTES], [0, 150_000, 0, MAX_FRAME_BYTES + 1, 1]]
)
def test_what_was_cut_is_put_together(body: int, memories: list[int]) -> None:
    sent = [some(n) for n in memories]
    assembly = Assembly()
    for _ in range(2):  # the second begins where the first has ended
        *first, last = (bytes(frame) for frame in frames_of(some(body), sent))
        assert max(map(len, (*first, last))) <= MAX_FRAME_BYTES
        assert [assembly.take(frame) for frame in first] == [None] * len(first)
        whole = assembly.take(last)
        assert whole is not None
        assert bytes(whole[0]) == some(body)
        assert [memory.dtype for memory in whole[1]] == [torch.uint8] * len(memories)
        assert [memory.numpy().tobytes() for memory in whole[1]] == sent


def test_many_small_memories_have_a_long_opening() -> None:
    sent = [b"%d" % i for i in range(40_000)]
    assembly = Assembly()
    got = [assembly.take(bytes(frame)) for frame in frames_of(b"body", sent)]
    assert got[:-1] == [None] * (len(got) - 1)
    assert got[-1] is not None
    assert [memory.numpy().tobytes() for memory in got[-1][1]] == sent


def test_frames_that_continue_nothing_are_refused() -> None:
    long = [bytes(frame) for frame in frames_of(b"", [some(100_000)])]
    assert len(long) == 3
    with pytest.raises(ValueError):
        Assembly().take(long[1])
    with pytest.raises(ValueError):
        Assembly().take(b"")
    with pytest.raises(ValueError):
        Assembly().take(b"\x0b" + bytes(7) + b"not msgpack")
    for wrong in (b"", some(MAX_FRAME_BYTES)):  # no memory has none left, or so much
        assembly = Assembly()
        assert assembly.take(long[0]) is None
        assert assembly.take(long[1]) is None
        with pytest.raises(ValueError):
            assembly.take(wrong)


def test_memory_of_negative_length_is_refused() -> None:
    with pytest.raises(ValueError):
        Assembly().take(b"\5" + bytes(7) + b"\x92\xa0\x91\xff\xc0")


def test_a_monitor_is_there_until_nothing_is_told_to_it() -> None:
    """ZeroMQ's thread waits for good for one that is gone, and whoever closes the socket for it."""
    done: list[str] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def disable_monitor(self) -> None:
            done.append(f"no more of the {self.name}")

        def close(self, linger: int) -> None:
            done.append(f"the {self.name} closes")

    way: Any = SimpleNamespace(socket=Noted("socket"), monitor=Noted("monitor"))
    sockets: Any = SimpleNamespace(_rest=lambda _: None, _monitors={}, _ends_at=None)
    Sockets._shut(sockets, way)
    assert done == ["no more of the socket", "the monitor closes", "the socket closes"]
