"""Firewalls between hosts that let in nothing but the store's port."""

from datetime import timedelta
from pathlib import Path

import pytest

import dure as dist
from dure.errors import CommError
from tests.comm.forked_ranks import Slot
from tests.comm.namespace_hosts import hosts
from tests.hosts.networks import STORE_PORT, close_ports, ranks_on, set_variables

pytestmark = pytest.mark.needs("firewalls", "engine")


def meet(slot: Slot, variables: dict[str, str]) -> tuple[str, int | None]:
    """Create the default group; return the error, and the peer that it names."""
    set_variables(slot.rank, variables)
    with pytest.raises(CommError) as caught:
        dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    return str(caught.value), caught.value.peer


@pytest.mark.parametrize("num_closed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_hosts_that_cannot_connect_are_named_on_all_ranks(num_closed: int, tmp_path: Path):
    refuse = num_closed == 2  # else packets are dropped, as by most firewalls
    with hosts(2, "wall") as made:
        for host in made[:num_closed]:
            close_ports(host, but=[STORE_PORT], refuse=refuse)
        with ranks_on(made, tmp_path, meet) as ranks:
            for rank, (error, peer) in enumerate(ranks.values()):
                to = 1 - rank if num_closed == 2 else 0
                here, there = made[1 - to], made[to]
                assert f"from {here.name} ({here.address})" in error
                assert f"rank {to} on {there.name} ({there.address}, port " in error
                assert ("refused" if refuse else "no answer") in error
                assert peer == 1 - rank
