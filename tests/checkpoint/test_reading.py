"""Reading a run's checkpoints: damage is found, and the older one is used."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dure.checkpoint import Checkpointer
from tests.checkpoint.manifests import write_manifest
from tests.checkpoint.small_runs import equal, small


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path):
    path = Checkpointer(tmp_path).save(1, state={"x": torch.ones(1000)})
    loaded = {}
    Checkpointer(tmp_path).load(state=loaded)
    with (path / "part-000001-00000.safetensors").open("r+b") as file:
        file.truncate(0)
    assert loaded["x"].sum() == 1000


@settings(max_examples=10)
@example(where=0.999, which=False, cut=False)  # of a tensor; those before are of the header
@given(where=st.floats(0, 1, exclude_max=True), which=st.booleans(), cut=st.booleans())
def test_any_changed_byte_is_found_and_the_older_checkpoint_used(
    tmp_path_factory, where, which, cut
):
    path = tmp_path_factory.mktemp("run")
    checkpoints = Checkpointer(path)
    values = [0.0]
    checkpoints.save(1, values=values, model=small(1))
    newest = checkpoints.save(2, values=[1.0], model=small(2))
    file = newest / ("manifest.json" if which else "part-000001-00000.safetensors")
    data = bytearray(file.read_bytes())
    at = int(where * len(data))
    data[at] ^= 1 << (at % 8)
    file.write_bytes(data[:at] if cut else data)
    loaded, model = [], small(3)
    assert checkpoints.load(values=loaded, model=model) == 1
    assert loaded == values
    assert equal(model.state_dict(), small(1).state_dict())
    assert list(checkpoints.refused) == [str(newest)]
    assert checkpoints.latest().step == 1  # type: ignore[union-attr]


FOREIGN = {
    "deep": b"[" * 100_000,
    "no rank": b'{"(run)": {"step": 2, "ranks": {}}}',
    "no random numbers": b'{"(run)": {"step": 2, "ranks": {"0": {}}}}',
    "no run": b"{}",
    "no device": b'{"x": {"$": "device", "v": "nowhere"}}',
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_manifest_that_nobody_here_wrote_is_refused_and_the_older_one_taken(tmp_path, kind):
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, model=small())
    newest = checkpoints.save(2, model=small())
    text = b'{"format": "dure checkpoint", "version": 3, "tensors": {}, "state": %b}'
    write_manifest(newest, text % FOREIGN[kind])
    assert checkpoints.load(model=small()) == 1
    assert list(checkpoints.refused) == [str(newest)]
