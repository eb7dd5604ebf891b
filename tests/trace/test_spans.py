"""Who listens to spans, and which are kept."""

from __future__ import annotations

from dure.trace import spans
from dure.trace.spans import Span, SpanRecorder


def test_keeper_listens_while_anybody_wants_it_and_keeps_the_last():
    keeper = SpanRecorder(capacity=2)
    keeper.start()
    keeper.start()
    try:
        for at in (3, 1, 2):
            spans.emit(Span(name=str(at), global_rank=7, start_ns=at))
        keeper.stop()
        spans.emit(Span(name="0", global_rank=7))
    finally:
        keeper.stop()
    spans.emit(Span(name="9", global_rank=7, start_ns=9))
    assert [span.name for span in keeper.of(7)] == ["0", "2"]
    assert keeper.of(0) == []
    assert keeper.keep not in spans.listeners
    keeper.start()
    keeper.stop()
    assert keeper.of(7) == []
