"""`dure.plan.memory` against what a model of examples/llm really keeps."""

import math
from typing import Any

import pytest
import torch

from dure.errors import UsageError
from dure.plan import Mesh, Model, Training, memory
from dure.tensor import DTensor
from dure.testing import run_ranks
from tests.parallel.ranks.llm_program import train

MODEL = Model(256, 64, 8, 8, 4, 128, 32)


def held(tensors: Any) -> int:
    """Return the bytes of the parts that this rank has."""
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.itemsize for t in parts)


def kept_by(stage: torch.nn.Module, inputs: torch.Tensor) -> int:
    """Return the bytes that a forward keeps for backward, parameters aside."""
    weights = {s for p in stage.parameters() for s in (p.shape, p.shape[::-1])}
    own = {p.untyped_storage().data_ptr() for p in stage.parameters() if not isinstance(p, DTensor)}
    seen: dict[int, int] = {}
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape not in weights and tensor.untyped_storage().data_ptr() not in own:
            kept.append(tensor)
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        stage(inputs)
    return sum(seen.values())


@pytest.mark.parametrize("cp", [1, 2])
def test_activations_are_those_that_a_forward_keeps(cp: int) -> None:
    flags = train.Flags(cp=cp, microbatches=1, batch=24)

    def run(_: int) -> int:
        trainer = train.Trainer(flags)
        inputs, _ = trainer.batch(0)
        with trainer.parallel():
            return kept_by(trainer.stages[0], inputs)

    planned = memory(MODEL, Mesh(cp=cp), Training(sequences=24))[0].activations
    for measured in run_ranks(cp, run):
        assert planned == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    "sizes", [{}, {"fsdp": 2}, {"dp": 2, "tp": 2}, {"fsdp": 2, "cp": 2}, {"fsdp": 2, "tp": 2}]
)
def test_parameters_gradients_and_state_are_those_of_the_parts(sizes: dict[str, int]) -> None:
    flags = train.Flags(**sizes, batch=8, microbatches=1, steps=1)

    def run(_: int) -> tuple[int, int, int]:
        trainer = train.Trainer(flags)
        trainer.train()
        parameters = list(trainer.stages[0].parameters())
        state = [v for o in trainer.optimizers for s in o.state.values() for v in s.values()]
        moments = [v for v in state if isinstance(v, torch.Tensor) and v.ndim]
        return held(parameters), held(moments), len(parameters)

    planned = memory(MODEL, Mesh(**sizes))[0]
    for parameters, moments, _ in run_ranks(math.prod(sizes.values()), run):
        assert planned.parameters == pytest.approx(parameters, rel=0.02)  # norms are not cut by tp
        assert planned.optimizer == pytest.approx(moments, rel=0.02)


def test_parameters_of_llama_3_on_each_rank_are_counted() -> None:
    llama = Model.of_size(8e9)
    assert llama.parameters == 8_030_261_248
    assert Model(128_256, 4096, 32, 32, 8, 14_336, 8192).parameters == 8_030_261_248
    found = memory(llama, Mesh(pp=4, fsdp=2, tp=2), Training(microbatches=8))
    held = [(rank.parameters / 2**30, rank.gradients / 2**30) for rank in found]
    ends, between = pytest.approx((2.11, 2.11), abs=0.005), pytest.approx((1.63, 1.63), abs=0.005)
    assert held == [ends, between, between, ends]


def test_a_pipeline_keeps_the_microbatches_that_its_schedule_has_live() -> None:
    one = memory(MODEL, Mesh(pp=4), Training(microbatches=1))
    deep = memory(MODEL, Mesh(pp=4), Training(microbatches=8))
    all_of_them = memory(MODEL, Mesh(pp=4), Training(microbatches=8, schedule="gpipe"))
    for rank in range(4):
        assert deep[rank].activations == (4 - rank) * one[rank].activations
        assert all_of_them[rank].activations == 8 * one[rank].activations
    assert [rank.stages for rank in deep] == [(range(i, i + 2),) for i in range(0, 8, 2)]
    assert deep[0].scores == 0 < deep[3].scores


def test_recomputing_keeps_the_inputs_of_layers_and_one_layer() -> None:
    tokens = 8 * 32
    plan = memory(MODEL, Mesh(), Training(sequences=8, recompute=True))[0]
    layer = tokens * (8 * 64 + 2 + 2 * 32 + 8 + 4 * 128)
    assert plan.activations == 4 * (8 * tokens * 64 + layer)


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (Mesh(tp=3), "tp divides the heads"),
        (Mesh(tp=8), "heads of keys: 4"),
        (Mesh(cp=5), "2 cp divides the length: 32"),
        (Mesh(pp=16), "Take pp=8"),
        (Mesh(ep=2), "ep divides the experts"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(mesh: Mesh, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        memory(MODEL, mesh)
    assert said in str(caught.value)


def test_a_mesh_and_a_model_are_read_from_text() -> None:
    assert Mesh.parse("pp=4, dp=2,tp=2") == Mesh(pp=4, dp=2, tp=2)
    with pytest.raises(UsageError, match="'pq=2'"):
        Mesh.parse("pq=2")
    with pytest.raises(UsageError, match="a model needs a width and layers"):
        Model.parse("width=64")
