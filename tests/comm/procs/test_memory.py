"""What a forked child of a rank has of tensors in the heap."""

from __future__ import annotations

import pytest
import torch

import dure
from dure.comm import functional
from tests.comm.forked_ranks import Ranks, Slot, in_child

pytestmark = pytest.mark.needs("engine")

_COUNT = 1 << 19  # of float32: 2 MiB, in the heap


def _gathers_and_forks(slot: Slot) -> dict[str, bool]:
    slot.init()
    mine = torch.full((_COUNT // 2,), 1.0 + slot.rank)
    kept, written = (
        functional.wait_tensor(functional.all_gather_tensor(mine, 0, None)) for _ in range(2)
    )
    expected = written.clone()
    seen = {"wrote": in_child(lambda: bool((written.fill_(9.0) == 9.0).all()))}
    seen["stayed"] = torch.equal(written, expected)
    seen["kept"] = in_child(lambda: torch.equal(kept, expected), lambda: kept.fill_(-1.0))
    dure.barrier()
    dure.destroy_process_group()
    return seen


def test_a_forked_child_has_results_of_its_own(tmp_path):
    with Ranks(2, tmp_path, _gathers_and_forks) as ranks:
        assert ranks.values() == [{"wrote": True, "stayed": True, "kept": True}] * 2


def _shares_and_forks(slot: Slot) -> dict[str, object]:
    slot.init()
    own, of_all = dure.shared_empty(100), dure.host_shared_empty(100)

    def writes() -> bool:
        own.fill_(2.0)
        of_all.fill_(2.0)
        return True

    in_child(writes)
    dure.barrier()
    stayed = not own.any() and not of_all.any()
    shown = in_child(lambda: bool((own == 1.0).all()), lambda: own.fill_(1.0))
    dure.barrier()
    dure.destroy_process_group()
    return {"stayed": stayed, "shown": shown}


def test_a_forked_child_sees_memory_that_is_shared_on_purpose_but_does_not_change_it(tmp_path):
    with Ranks(2, tmp_path, _shares_and_forks) as ranks:
        assert ranks.values() == [{"stayed": True, "shown": True}] * 2
