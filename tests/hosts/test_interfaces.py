"""Hosts with several addresses: where data go, and where workers of RPC listen."""

import os
import socket
from pathlib import Path

import pytest
import torch

import dure as dist
from dure import rpc
from tests.comm.forked_ranks import Slot
from tests.comm.namespace_hosts import hosts
from tests.hosts.networks import (
    add_second_network,
    give_names,
    ranks_on,
    received,
    set_variables,
)

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


def listening() -> set[str]:
    """Return the addresses at which processes of this host listen."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    found = [fields[1].partition(":")[0] for fields in map(str.split, lines) if fields[3] == "0A"]
    return {socket.inet_ntoa(bytes.fromhex(each)[::-1]) for each in found}


def meet_in_a_file(slot: Slot, variables: dict[str, str], is_fixed: bool) -> set[str]:
    """Meet where no variable says where hosts are: the name of each means 127.0.1.1 there."""
    set_variables(slot.rank, variables)
    del os.environ["MASTER_ADDR"]
    size = slot.size if is_fixed else None
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{slot.path}")
    rpc.init_rpc(f"w{slot.rank}", rank=slot.rank, world_size=size, rpc_backend_options=options)
    found = listening()
    if is_fixed:
        other = f"w{(slot.rank + 1) % slot.size}"
        assert rpc.rpc_sync(other, torch.add, args=(torch.ones(1), 1)).item() == 2
    rpc.shutdown()
    return found


@pytest.mark.parametrize(
    ("num_hosts", "is_fixed", "addresses"),
    [
        (1, True, [{"127.0.0.1"}] * 2),
        (2, True, [{"10.213.7.1"}, {"10.213.7.2"}]),
        (1, False, [{"10.213.7.1"}] * 2),  # others may come, from anywhere
    ],
    ids=["one host", "two hosts", "whoever comes"],
)
def test_workers_of_rpc_listen_where_all_of_them_reach_each_other(
    num_hosts: int, is_fixed: bool, addresses: list[set[str]], tmp_path: Path
):
    with hosts(num_hosts, "rpc") as made:
        give_names(made, tmp_path)
        each = 2 // num_hosts
        with ranks_on(made, tmp_path, meet_in_a_file, is_fixed, each=each) as ranks:
            assert ranks.values() == addresses
