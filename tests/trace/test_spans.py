"""Who listens to spans, and which are kept."""

from __future__ import annotations

from dure.trace import spans
from dure.trace.spans import Span, SpanRecorder


def test_recorder_listens_while_it_has_users_and_keeps_the_last():
    recorder = SpanRecorder(capacity=2)
    recorder.start()
    recorder.start()
    try:
        for at in (3, 1, 2):
            spans.emit(Span(name=str(at), global_rank=7, start_ns=at))
        recorder.stop()
        spans.emit(Span(name="0", global_rank=7))
    finally:
        recorder.stop()
    spans.emit(Span(name="9", global_rank=7, start_ns=9))
    assert [span.name for span in recorder.of(7)] == ["0", "2"]
    assert recorder.of(0) == []
    assert recorder.keep not in spans.listeners
    recorder.start()
    recorder.stop()
    assert recorder.of(7) == []
