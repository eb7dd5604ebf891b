"""Copies that a save in the background writes: how much, and for how long they are kept."""

import torch

from dure.checkpoint import async_save
from dure.checkpoint.staging import BlockingAsyncStager, DefaultStager
from tests.checkpoint.saved_states import loaded
from tests.thread_ranks import on_ranks
from tests.waiting import PATIENCE_S


def test_the_buffer_is_kept_and_told_and_given_back(tmp_path):
    stager = DefaultStager()
    places = []
    for value in (1.0, 2.0):
        state = {"w": torch.full((100,), value), "t": torch.full((3, 2), value).t()}
        response = async_save(state, checkpoint_id=tmp_path, async_stager=stager)
        assert response.staging_completion.done()
        response.upload_completion.result(PATIENCE_S)
        assert stager.num_bytes == 448 + 64  # 400 and 24 bytes, each to the next 64
        places.append(stager._buffer.data_ptr())
        assert loaded(tmp_path, 100) == [value] * 100
    assert places[0] == places[1]
    stager.close()
    assert stager.num_bytes == 0


@on_ranks(2)
def test_a_rank_holds_only_what_it_writes(rank, tmp_path):
    stager = DefaultStager()
    state = {f"w{i}": torch.zeros(16) for i in range(4)}  # 64 bytes each
    response = async_save(state, checkpoint_id=tmp_path, async_stager=stager)
    response.upload_completion.result(PATIENCE_S)
    assert stager.num_bytes == 128


def test_a_staged_state_does_not_see_later_writes():
    stager = BlockingAsyncStager()
    state = {"weight": torch.ones(2), "steps": [1, 2]}
    staged = stager.stage(state)
    stager.synchronize_staging()
    state["weight"].zero_()
    state["steps"].append(3)
    assert staged["weight"].tolist() == [1, 1]
    assert staged["steps"] == [1, 2]
    stager.close()
