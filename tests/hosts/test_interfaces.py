"""Hosts on two networks: the data go where GLOO_SOCKET_IFNAME says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dure as dist
from tests.comm.forked_ranks import Slot
from tests.comm.namespace_hosts import hosts
from tests.hosts.networks import add_second_network, ranks_on, received, set_variables

pytestmark = pytest.mark.needs("network namespaces", "engine")

NBYTES = 8 << 20


def reduce(slot: Slot, variables: dict[str, str], backend: str | None) -> float:
    set_variables(slot.rank, variables)
    dist.init_process_group(backend)
    tensor = torch.ones(NBYTES // 4)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor[-1].item()


def test_the_chosen_interface_carries_the_data(tmp_path: Path):
    with hosts(2, "two") as made:
        add_second_network(made)
        for backend in ("gloo", None):
            folder = tmp_path / str(backend)
            folder.mkdir()
            before = {name: received(made[1], name) for name in ("eth0", "eth1")}
            with ranks_on(made, folder, reduce, backend, GLOO_SOCKET_IFNAME="eth1") as ranks:
                assert ranks.values() == [2.0, 2.0]
            taken = {name: received(made[1], name) - before[name] for name in before}
            assert taken["eth1"] > NBYTES // 2
            assert taken["eth0"] < NBYTES // 8, "the store's only"
