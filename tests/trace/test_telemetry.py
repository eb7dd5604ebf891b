"""Spans of OpenTelemetry, collected in memory by its SDK."""

import subprocess
import sys
import textwrap
import time

import pytest

from dure.trace import telemetry
from dure.trace.record import Record, State
from dure.trace.spans import BUCKETS, Span
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.needs("OpenTelemetry")

MS = 1_000_000
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
AT = time.monotonic_ns() + 10**12  # later than any exporter's beginning


@pytest.fixture(scope="module")
def provided():
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    made = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    trace.set_tracer_provider(provider)
    return made


@pytest.fixture
def made(provided):
    provided.clear()
    return provided


def _record(seq, duration_ms, end_ms=0, **fields):
    end_ns = AT + end_ms * MS
    times = {"start_ns": end_ns - duration_ms * MS, "end_ns": end_ns}
    fields = {"state": State.SUCCEEDED, "nbytes": 8, "file": "train.py", "line": 7} | fields
    return Record(group="world", op="all_reduce", seq=seq, global_rank=1, **times, **fields)


def test_operations_above_the_threshold_become_spans_once_with_their_times(made):
    exporter = telemetry.Exporter(10)
    records = [_record(1, 9), _record(2, 10), _record(3, 40, end_ms=5000)]
    exporter.export(records, [], AT + 100 * MS)
    exporter.export(records, [], AT + 200 * MS)
    (span,) = made.get_finished_spans()
    assert span.name == "dure.all_reduce"
    assert span.end_time - span.start_time == 10 * MS
    assert dict(span.attributes) == {
        "dure.rank": 1,
        "dure.group": "world",
        "dure.number": 2,
        "dure.bytes": 8,
        "dure.call_site": "train.py:7",
    }
    assert span.parent is None
    exporter.export(records, [], AT + 6000 * MS)
    assert [s.attributes["dure.number"] for s in made.get_finished_spans()] == [2, 3]


def test_a_failed_operation_is_an_error(made):
    telemetry.Exporter(0).export(
        [_record(1, 1, state=State.FAILED, error="PeerLost")], [], AT + 100 * MS
    )
    (span,) = made.get_finished_spans()
    assert not span.status.is_ok
    assert span.status.description == "PeerLost"


def test_phases_of_steps_become_spans_below_the_launch(made):
    phases = [
        Span(name="forward", global_rank=2, start_ns=AT - 5 * MS, end_ns=AT),
        Span(name="bucket", track=BUCKETS, global_rank=2, start_ns=AT - 5 * MS, end_ns=AT),
    ]
    exporter = telemetry.Exporter(10, f"00-{TRACE}-{PARENT}-01")
    exporter.export([], phases, AT + 100 * MS)
    (span,) = made.get_finished_spans()
    assert span.name == "dure.step.forward"
    assert span.attributes["dure.rank"] == 2
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT


def test_a_launch_is_a_span_that_ranks_are_told(made, monkeypatch):
    monkeypatch.setenv("DURE_OTEL_MS", "10")
    with telemetry.launch_span("train.py", 4) as variables:
        assert made.get_finished_spans() == ()
    (span,) = made.get_finished_spans()
    assert span.name == "dure.launch"
    assert dict(span.attributes) == {"dure.program": "train.py", "dure.ranks": 4}
    ids = f"{span.context.trace_id:032x}-{span.context.span_id:016x}"
    assert variables["TRACEPARENT"].startswith(f"00-{ids}-")


def test_without_the_variable_there_is_no_span_and_no_import(made, monkeypatch):
    monkeypatch.delenv("DURE_OTEL_MS", raising=False)
    with telemetry.launch_span("train.py", 4) as variables:
        assert variables == {}
    assert made.get_finished_spans() == ()
    program = """
        import sys, threading, dure
        dure.init_process_group("threads", rank=0, world_size=1, store=dure.HashStore())
        assert not any(name.startswith("opentelemetry") for name in sys.modules)
        assert not any("telemetry" in thread.name for thread in threading.enumerate())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


PROGRAM = """
    import time
    import torch, dure
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

    trace.set_tracer_provider(TracerProvider())
    shown = ConsoleSpanExporter(formatter=lambda s: f"span {s.name} {s.attributes['dure.rank']}\\n")
    trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(shown))
    dure.init_process_group()
    model = dure.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    dure.all_reduce(torch.ones(3))
    dure.destroy_process_group()
"""


def test_ranks_of_a_job_make_spans_until_they_end(job):
    ended = job.run("--nproc", "2", job.write(PROGRAM), env={"DURE_OTEL_MS": "0"})
    assert ended.code == 0, ended.err
    for rank in (0, 1):
        lines = ended.lines(rank)
        assert f"span dure.all_reduce {rank}" in lines
        assert f"span dure.step.forward {rank}" in lines
        assert f"span dure.step.backward {rank}" in lines
