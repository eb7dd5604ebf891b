"""A custom storage: it gets each item once, of two ranks."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from dure.checkpoint import (
    Metadata,
    StorageReader,
    StorageWriter,
    load_state_dict,
    save_state_dict,
)
from dure.checkpoint.planner import LoadItemType
from dure.checkpoint.storage import WriteResult, done
from dure.testing import run_ranks
from tests.checkpoint.saved_states import WHOLE, rows


class InMemory(StorageWriter, StorageReader):
    """A dict that all thread-ranks share."""

    def __init__(self, kept: dict[Any, Any]):
        self.kept = kept

    def write_data(self, plan, planner):
        results = []
        for item in plan.items:
            data = planner.resolve_data(item)
            assert item.index not in self.kept  # one rank writes what both have
            copy = data.getvalue() if isinstance(data, io.BytesIO) else data.detach().clone()
            self.kept[item.index] = copy
            results.append(WriteResult(item.index, 0, None))
        return done(results)

    def finish(self, metadata, results):
        assert sorted(r.index.fqn for one in results for r in one) == ["n.b", "step", "w", "w"]
        self.kept["metadata"] = metadata

    def read_metadata(self, *args, **kwargs):
        return self.kept["metadata"]

    def read_data(self, plan, planner):
        for item in plan.items:
            data = self.kept[item.storage_index]
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(data))
            else:
                to = planner.resolve_tensor(item)
                for dim, at in enumerate(item.storage_offsets):
                    data = data.narrow(dim, at, item.lengths[dim])
                to.copy_(data)
        return done(None)


@pytest.mark.parametrize("coordinator", [0, 1])
def test_a_storage_of_ones_own_gets_each_item_once(coordinator):
    kept: dict[Any, Any] = {}

    def body(rank):
        state = {"w": rows(WHOLE), "n": {"b": torch.ones(2)}, "step": rank}
        made = save_state_dict(state, InMemory(kept), coordinator_rank=coordinator)
        assert isinstance(made, Metadata) and made.planner_data["n.b"] == ("n", "b")
        into: dict[str, Any] = {
            "w": rows(torch.zeros(7, 4), 1),
            "n": {"b": torch.zeros(2)},
            "step": None,
        }
        load_state_dict(into, InMemory(kept), coordinator_rank=coordinator)
        assert torch.equal(into["w"].full_tensor(), WHOLE)
        assert into["n"]["b"].tolist() == [1, 1] and into["step"] in (0, 1)

    run_ranks(2, body)
