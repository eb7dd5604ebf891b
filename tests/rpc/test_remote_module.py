"""RemoteModule: a module elsewhere, used as one that is here."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from dure import autograd
from dure.errors import RpcError, UsageError
from dure.nn import RemoteModule
from dure.optim import DistributedOptimizer
from dure.rpc import api
from dure.rpc.allow import Allowed
from dure.rpc.rref import RRef
from tests.rpc.gates import Cluster


class Scale(torch.nn.Module):
    def __init__(self, by: float, inner: bool = False) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.tensor(by))
        if inner:
            self.inner = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, plus: float = 0.0) -> torch.Tensor:
        return x * self.by + plus


class NoModule:
    pass


class Where(torch.nn.Module):
    def forward(self) -> str:
        return api.get_worker_info().name


def is_training(rref: RRef[torch.nn.Module]) -> bool:
    return rref.local_value().training


def call(module: RemoteModule, x: torch.Tensor) -> torch.Tensor:
    return module(x)


def has_note(module: RemoteModule) -> bool:
    return hasattr(module, "note")


def devices(module: RemoteModule) -> tuple[str | int, str]:
    return module.on, module.device


def test_forward_runs_there(cluster: Cluster) -> None:
    with cluster.on(0):
        module = RemoteModule("worker1/cpu", Scale, (3.0,))
        assert module(torch.tensor([1.0, 2.0])).tolist() == [3.0, 6.0]
        assert module.forward(torch.ones(1), plus=2.0).tolist() == [5.0]
        assert module.forward_async(torch.ones(1), 1.0).wait().tolist() == [4.0]
        assert RemoteModule("worker2", Where)() == "worker2"
        assert RemoteModule("rank:1/cpu", Where)() == "worker1"
        assert RemoteModule("worker0", Where)() == "worker0"


def test_remote_parameters(cluster: Cluster) -> None:
    with cluster.on(0):
        module = RemoteModule("worker1", Scale, (3.0,), {"inner": True})
        assert len(module.remote_parameters()) == 3
        (by,) = module.remote_parameters(recurse=False)
        assert by.owner_name() == "worker1"
        assert by.to_here().item() == 3.0


def test_train_and_eval(cluster: Cluster) -> None:
    with cluster.on(0):
        module = RemoteModule("worker1", Scale, (3.0,))
        rref = module.get_module_rref()
        assert module.eval() is module
        assert api.rpc_sync("worker1", is_training, (rref,)) is False
        assert module.train() is module
        assert api.rpc_sync("worker1", is_training, (rref,)) is True


def test_sent_to_another_worker_it_is_the_same_module(cluster: Cluster) -> None:
    with cluster.on(0):
        module = RemoteModule("worker1", Scale, (3.0,))
        module.note = torch.nn.ReLU()
        assert api.rpc_sync("worker2", call, (module, torch.ones(1))).tolist() == [3.0]
        assert not api.rpc_sync("worker2", has_note, (module,))
        again = RemoteModule.init_from_module_rref("worker1/cpu", module.get_module_rref())
        assert api.rpc_sync("worker2", devices, (again,)) == ("worker1", "cpu")
        assert again(torch.ones(1)).tolist() == [3.0]
        with pytest.raises(RpcError, match="only be pickled when using RPC"):
            pickle.dumps(module)


def test_what_is_wrong(cluster: Cluster) -> None:
    with pytest.raises(RpcError, match="has not been initialized"):
        RemoteModule("worker1", Scale, (3.0,))
    with cluster.on(0):
        bad: Any = NoModule
        with pytest.raises(ValueError, match=r"returns an instance of <class nn\.Module>"):
            RemoteModule("worker1", bad).forward()
        for device in ("", "/cpu", "worker1/toaster", "rank:one"):
            with pytest.raises(UsageError, match="must name a worker and a device"):
                RemoteModule(device, Scale, (3.0,))
        with pytest.raises(RpcError, match="could not find destination"):
            RemoteModule("nobody", Scale, (3.0,))


def test_a_list_of_what_is_allowed_holds_for_classes_and_methods() -> None:
    with Cluster(2, allow=Allowed([Scale, torch.optim.SGD])) as cluster, cluster.on(0):
        module = RemoteModule("worker1", Scale, (3.0,))
        assert module(torch.ones(1)).tolist() == [3.0]
        parameters = module.eval().remote_parameters()
        optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=1.0)
        with autograd.context() as context_id:
            autograd.backward(context_id, [module(torch.ones(1)).sum()])
            optimizer.step(context_id)
        assert module(torch.ones(1)).tolist() == [2.0]
        with pytest.raises(RpcError, match="does not let others call that"):
            RemoteModule("worker1", Where)()
        with pytest.raises(RpcError, match="does not let others call that"):
            DistributedOptimizer(torch.optim.Adam, parameters)


def test_calls_go_to_where_the_module_lies_whatever_device_was_named(cluster: Cluster) -> None:
    with cluster.on(0):
        module = RemoteModule("worker1", Scale, (3.0,))
        sent = "worker2", module.get_module_rref()
        named = api.rpc_sync("worker2", RemoteModule.init_from_module_rref, sent)
        assert named.on == "worker2"
        assert named(torch.ones(2)).tolist() == [3.0, 3.0]
        assert named.remote_parameters()[0].owner_name() == "worker1"
