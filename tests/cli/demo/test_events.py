"""Events of a demo's ranks, as lines."""

import pytest

from dure.cli.demo.events import EpochEnd, Step, decode, encode
from tests.cli.demo.demo_sample import START, phases


@pytest.mark.parametrize(
    "event",
    [START, Step(step=3, loss=0.25, phases=phases(1.0, 0.5)), EpochEnd(epoch=1, accuracy=0.5)],
)
def test_event_comes_back_from_its_line(event):
    assert "\n" not in encode(event)
    assert decode(encode(event)) == event


@pytest.mark.parametrize(
    "line", ["", "epoch 1", '{"loss": 1}', '{"dure_demo":', '{"dure_demo":"other"}', "\ufffd"]
)
def test_ordinary_output_is_no_event(line):
    assert decode(line) is None
