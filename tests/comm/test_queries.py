"""What programs ask before they choose a backend."""

import pytest
import torch

import dure as dist
from dure.native import available


def test_backends_that_exist_and_run_here():
    assert dist.is_available()
    assert dist.is_backend_available("GLOO") == dist.is_gloo_available()
    for name in ("shm", "hybrid"):
        assert dist.is_backend_available(name) == available()[0]
    assert dist.is_backend_available("hybrid_mpi") == (available()[0] and dist.is_mpi_available())
    assert dist.is_backend_available("nccl") == dist.is_nccl_available()
    assert not dist.is_backend_available("carrier-pigeon")
    assert not dist.is_ucc_available()
    assert not dist.is_xccl_available()


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_default_backend_of_the_cpu_can_run(device):
    assert dist.is_backend_available(dist.get_default_backend_for_device(device))


def test_launched_tells_whether_a_launcher_set_its_variables(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not dist.is_torchelastic_launched()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert dist.is_torchelastic_launched()
