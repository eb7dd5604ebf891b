"""Who listens to spans, and which are kept."""

from dure.trace import spans
from dure.trace.spans import Span, SpanRecorder


def test_recorder_listens_until_it_is_stopped_and_keeps_the_last():
    recorder = SpanRecorder(capacity=2)
    recorder.start()
    try:
        for at in (3, 1, 2, 0):
            spans.emit(Span(name=str(at), global_rank=7, start_ns=at))
    finally:
        recorder.stop()
    spans.emit(Span(name="9", global_rank=7, start_ns=9))
    assert [span.name for span in recorder.of(7)] == ["0", "2"]
    assert recorder.of(0) == []
    assert recorder.keep not in spans.listeners
    recorder.start()
    recorder.stop()
    assert recorder.of(7) == []
