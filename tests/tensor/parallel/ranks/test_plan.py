"""`parallelize_module`: styles by the paths of modules, and plans that do not fit."""

import pytest
import torch
from torch import nn

from dure.errors import MeshError, PlacementError, UsageError
from dure.mesh import init_device_mesh
from dure.tensor import Replicate, Shard
from dure.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    parallelize_module,
)
from dure.testing import run_ranks
from tests.tensor.parallel.ranks.tensor_models import small_llama
from tests.thread_ranks import on_mesh


@on_mesh(1)
def test_paths_match_by_component_and_a_path_without_a_match_warns(mesh):
    model = small_llama()
    names = []

    class Notes(ParallelStyle):
        def _apply(self, module, device_mesh):
            names.append(module)
            return module

    parallelize_module(model, mesh, {"layers.?.attention.?*": Notes(), "": Notes()})
    assert len(names) == 2 * 4 + 1
    assert names[-1] is model
    for plan in (None, {}):
        with pytest.warns(UserWarning, match="parallelize_plan is empty"):
            parallelize_module(model, mesh, plan)
    with pytest.warns(UserWarning, match=r"layers\.0\.attention\.q"):
        parallelize_module(model, mesh, {"layers.*.attn.q": Notes()})


def test_plans_that_do_not_fit_name_the_module():
    torch_style = type("SequenceParallel", (), {"__module__": "torch.distributed.tensor.parallel"})

    def body(rank):
        mesh = init_device_mesh("cpu", (3,))
        wrong = [
            ({"layers.*.attention.q": ColwiseParallel()}, PlacementError, "layers.0.attention.q"),
            ({"layers.*.attention.k": ColwiseParallel()}, PlacementError, "n_kv_heads is 2"),
            ({"norm": ColwiseParallel()}, UsageError, "norm"),
            ({"head": "columns"}, UsageError, "head"),
            (3, UsageError, "parallelize_plan"),
            (torch_style(), UsageError, "Import SequenceParallel from dure"),
            ({"head": torch_style()}, UsageError, "Import SequenceParallel"),
        ]
        for plan, kind, text in wrong:
            with pytest.raises(kind, match=text):
                parallelize_module(small_llama(), mesh, plan)
        with pytest.raises(MeshError):
            parallelize_module(small_llama(), init_device_mesh("cpu", (1, 3)), ColwiseParallel())
        with pytest.raises(MeshError):
            parallelize_module(small_llama(), None, ColwiseParallel())
        tied = small_llama(tied=True)
        with pytest.raises(PlacementError, match="share"):
            parallelize_module(tied, mesh, {"embed": ColwiseParallel(), "head": ColwiseParallel()})
        for style in (
            lambda: PrepareModuleInput(input_layouts=Shard(0)),
            lambda: PrepareModuleInput(input_kwarg_layouts={"a": Shard(0)}),
            lambda: PrepareModuleOutput(
                output_layouts=(Shard(0), None), desired_output_layouts=Shard(0)
            ),
        ):
            with pytest.raises(PlacementError):
                style()
        two_inputs = PrepareModuleInput(
            input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None)
        )
        with pytest.raises(PlacementError):
            parallelize_module(nn.Identity(), mesh, two_inputs)(torch.ones(1))

    run_ranks(3, body)
