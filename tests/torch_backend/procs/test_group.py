"""Groups of the plug-in: unequal calls, ranks that leave, and hosts."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from dure.errors import CommTimeout, Desync
from dure.testing import ProcessPool
from tests.torch_backend.torch_worlds import in_pool, shared, td, world


def unequal_calls(rank: int, folder: str) -> None:
    with world(rank, folder):
        tensor = torch.ones(2 + rank)
        with pytest.raises(Desync) as raised:
            td.all_reduce(tensor)
        assert set(raised.value.calls) == {0, 1}
        assert (tensor == 1).all()


test_unequal_calls = in_pool(unequal_calls)


def left_without_a_word(rank: int, folder: str) -> None:
    with world(rank, folder) as group:
        pair = td.new_group([0, 1])
        backend = pair._get_backend(torch.device("cpu"))
        backend._set_default_timeout(timedelta(seconds=0.2))
        assert backend.options._timeout == timedelta(seconds=0.2)
        if rank == 0:
            with pytest.raises(CommTimeout) as raised:
                td.all_reduce(torch.ones(1), group=pair)
            assert raised.value.missing == (1,)
            shared(group).set("over", "yes")
        else:
            shared(group).wait(["over"])
        pair.abort()
        td.all_reduce(torch.ones(1))


test_left_without_a_word = in_pool(left_without_a_word)


def over_hosts(rank: int, folder: str) -> None:
    """Two ranks that pretend to be on two hosts."""
    with world(rank, folder) as group:
        assert group.ours.backend_name == "hybrid"
        tensor = torch.full((3,), float(rank))
        td.all_reduce(tensor)
        assert tensor.tolist() == [1.0] * 3


def test_ranks_of_two_hosts_get_shared_memory_inside_and_gloo_between(tmp_path):
    with ProcessPool(2, "hybrid", hosts="ab") as pool:
        pool.run(over_hosts, str(tmp_path))


def made_twice(rank: int, folder: str) -> None:
    """Groups of one name in one store: the second one does not find keys of the first."""
    with world(rank, folder) as group:
        for n in range(3):
            pair = group._get_backend(torch.device("cpu")).split_group([0, 1])
            assert pair.ours.backend_name == "hybrid"
            tensor = torch.full((3,), rank + n)
            pair.allreduce([tensor]).wait()
            assert tensor.tolist() == [2 * n + 1] * 3
            pair.ours.close()


def test_a_second_group_of_a_name_over_two_hosts_works(tmp_path):
    with ProcessPool(2, "hybrid", hosts="ab") as pool:
        pool.run(made_twice, str(tmp_path))
