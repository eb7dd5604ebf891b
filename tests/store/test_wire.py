"""Messages of the store: how they are cut into frames, and how long they may be."""

import pytest

from dure.errors import StoreError
from dure.store import wire
from dure.store.wire import MAX_FRAME_BYTES, MAX_VALUE_BYTES, encode, frames_of, join


@pytest.mark.parametrize("size", [0, 1, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1, 3 * MAX_FRAME_BYTES])
def test_a_message_is_cut_into_frames_and_put_together_again(size: int) -> None:
    message = bytes(range(256)) * (size // 256) + bytes(size % 256)
    frames = [bytes(frame) for frame in frames_of(message)]
    assert max(map(len, frames)) <= MAX_FRAME_BYTES
    assert join(frames) == message


def test_a_message_longer_than_any_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 20)
    assert join([bytes(10)] * 2) == bytes(20)
    with pytest.raises(StoreError):
        join([bytes(10), bytes(10), b"1"])


def test_a_value_that_is_too_long_is_refused() -> None:
    with pytest.raises(StoreError):
        encode(bytes(MAX_VALUE_BYTES + 1), "set")
