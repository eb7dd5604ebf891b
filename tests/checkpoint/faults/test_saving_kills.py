"""Ranks are killed in the midst of saves: what was reported saved is there, whole.

Two processes save one number after another into one folder, at the call and in the background in
turn, and tell each number that was reported saved. One or both are killed at a random moment. What
is loaded then is whole: all of one number, which is the last one reported, or a later one.
"""

from __future__ import annotations

import os
import random
import time
from itertools import count
from pathlib import Path

import pytest
import torch

import dure
from dure.checkpoint import async_save, load, save
from dure.errors import DureError
from dure.tensor import Shard, full, init_device_mesh
from dure.testing.pool import start_server
from tests.waiting import PATIENCE_S, until

ROWS, COLUMNS = 64, 1024


def _save_on_and_on(rank: int, folder: str, trial: int, first: int) -> None:
    torch.set_num_threads(1)
    dure.init_process_group(init_method=f"file://{folder}/meeting-{trial}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    try:
        for number in count(first):
            rows = full((ROWS, COLUMNS), float(number), device_mesh=mesh, placements=[Shard(0)])
            state = {"rows": rows, "number": number}
            if number % 2:
                save(state, checkpoint_id=f"{folder}/saved")
            else:
                async_save(state, checkpoint_id=f"{folder}/saved").result()
            Path(folder, f"told-{trial}-{rank}").write_text(str(number))
    except DureError:
        os._exit(1)  # the other one is gone


def _told(folder: Path) -> int:
    """Return the last number that some rank reported; a file that a kill left empty tells none."""
    texts = [path.read_text() for path in folder.glob("told-*")]
    return max((int(text) for text in texts if text), default=0)


def _kills(folder: Path, trials: int, seed: int) -> list[int]:
    """Kill savers again and again; return the number that was loaded after each kill."""
    rng = random.Random(seed)
    context = start_server()
    found = [0]
    for trial in range(trials):
        ranks = [
            context.Process(target=_save_on_and_on, args=(r, str(folder), trial, found[-1] + 1))
            for r in range(2)
        ]
        for rank in ranks:
            rank.start()
        until(lambda n=trial: list(folder.glob(f"told-{n}-*")), "the first number")
        time.sleep(rng.uniform(0, 0.03))
        for victim in rng.sample(ranks, rng.choice([1, 2])):
            victim.kill()
        for rank in ranks:
            rank.join(PATIENCE_S)
            assert not rank.is_alive()
            rank.close()
        state = {"rows": torch.zeros(ROWS, COLUMNS), "number": 0}
        load(state, checkpoint_id=folder / "saved")
        number = state["number"]
        assert isinstance(number, int) and number >= _told(folder)
        assert state["rows"].eq(number).all(), f"trial {trial}: not of one save"
        found.append(number)
    return found


@pytest.mark.parametrize(
    ("trials", "seed"),
    [
        (5, 1),
        pytest.param(200, 2, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_kills_lose_nothing_that_was_reported_saved(tmp_path, trials, seed):
    found = _kills(tmp_path, trials, seed)
    assert found == sorted(set(found))  # each trial has saved something
