"""One address for a process group, RPC and a store of the program, in one process."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import dure
from dure import rpc
from dure.store import FileStore, Store, TCPStore
from tests.comm.forked_ranks import Ranks, Slot
from tests.waiting import PATIENCE_S, key_file

pytestmark = pytest.mark.needs("engine")

LIMIT = timedelta(seconds=PATIENCE_S)


class Group:
    def __init__(self, slot: Slot, url: str, port: int) -> None:
        dure.init_process_group("gloo", url, rank=slot.rank, world_size=slot.size)

    def use(self, slot: Slot, turn: str) -> None:
        x = torch.ones(1)
        dure.all_reduce(x)
        assert x.item() == slot.size

    def close(self) -> None:
        dure.destroy_process_group()


class Rpc:
    def __init__(self, slot: Slot, url: str, port: int) -> None:
        options = rpc.TensorPipeRpcBackendOptions(init_method=url)
        name = f"worker{slot.rank}"
        rpc.init_rpc(name, rank=slot.rank, world_size=slot.size, rpc_backend_options=options)

    def use(self, slot: Slot, turn: str) -> None:
        assert rpc.rpc_sync(f"worker{1 - slot.rank}", divmod, (7, 2)) == (3, 1)

    def close(self) -> None:
        rpc.shutdown()


class OwnStore:
    """A store that the program opens: every rank sets a key, and waits for those of all."""

    def __init__(self, slot: Slot, url: str, port: int) -> None:
        self.store: Store = (
            FileStore(url.removeprefix("file://"), slot.size, LIMIT)
            if url.startswith("file:")
            else TCPStore("localhost", port, slot.size, slot.rank == 0, LIMIT)
        )

    def use(self, slot: Slot, turn: str) -> None:
        self.store.set(f"{turn} {slot.rank}", "here")
        self.store.wait([f"{turn} {rank}" for rank in range(slot.size)])

    def close(self) -> None:
        self.store.close()


USERS: dict[str, Callable[[Slot, str, int], Group | Rpc | OwnStore]] = {
    "group": Group,
    "RPC": Rpc,
    "store": OwnStore,
}
PAIRS = [(a, b) for a in USERS for b in USERS if a != b or a == "store"]


def meet(slot: Slot, way: str, port: int, key: str, pair: tuple[str, str], order: int) -> None:
    """Open two users of one address, use both, and close them in an order."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "DURE_JOB_KEY_FILE": key}
    url = {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{key}.meeting"}.get(way, "env://")
    if way == "torchrun":
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": str(slot.size)}
    users = [USERS[name](slot, url, port) for name in pair]
    for user in users:
        user.use(slot, f"{pair} {order}")
    for user in users[::order]:
        user.close()


@pytest.mark.parametrize("way", ["env", "tcp", "file", "torchrun"])
def test_users_of_one_address_share_its_store(way: str, port: int, tmp_path: Path) -> None:
    key = str(key_file(tmp_path / "key"))
    with Ranks(2, tmp_path) as ranks:
        for pair in PAIRS if way != "torchrun" else PAIRS[:1]:  # the port is torchrun's
            for order in (1, -1):  # at once after the one before has ended on both ranks
                assert ranks.run(meet, 2, way, port, key, pair, order) == [None, None]
