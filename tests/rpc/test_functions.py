"""Functions that return futures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dure.errors import RpcError
from dure.rpc import api
from dure.rpc.functions import async_execution
from tests.rpc.gates import Cluster, add
from tests.waiting import until


@async_execution
def add_there(to: str, a: Any, b: Any) -> torch.futures.Future[Any]:
    return api.rpc_async(to, add, (a, b)).then(lambda done: done.wait() + 1)


@async_execution
def no_future() -> Any:
    return 3


class Methods:
    @async_execution
    def none(self) -> Any:
        return 3

    @staticmethod
    @async_execution
    def static(to: str, a: int) -> torch.futures.Future[Any]:
        return api.rpc_async(to, add, (a, 10))

    def named(self, name: str) -> str:
        return name

    @classmethod
    @async_execution
    def of_class(cls, to: str, a: int) -> torch.futures.Future[Any]:
        return api.rpc_async(to, add, (a, 20))


def test_functions_that_return_futures() -> None:
    with Cluster(3, slots=1) as cluster, cluster.on(0):
        assert api.rpc_sync("worker1", add_there, ("worker2", 1, 2)) == 4
        assert api.remote("worker1", add_there, ("worker2", 1, 2)).to_here() == 4
        assert api.rpc_async("worker1", Methods.static, ("worker1", 1)).wait() == 11
        assert api.rpc_sync("worker1", Methods.of_class, ("worker0", 1)) == 21
        with pytest.raises(RuntimeError, match="unsupported operand"):  # as callbacks of torch do
            api.rpc_sync("worker1", add_there, ("worker2", 1, "two"))
        with pytest.raises(RpcError, match=r"must return a torch\.futures\.Future"):
            api.rpc_sync("worker1", no_future)
        of_methods = api.remote("worker1", Methods)
        with pytest.raises(RpcError, match=r"must return a torch\.futures\.Future"):
            of_methods.rpc_sync().none()
        assert of_methods.rpc_sync().named(name="a name") == "a name"
        until(lambda: cluster.agents[1].activity()[1] == 0, "what a shutdown waits for")
