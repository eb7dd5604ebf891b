"""Fully sharded training of what torch.compile has compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dure.fsdp import fully_shard
from tests.parallel.fsdp.ranks.fsdp_models import Net, compare, made, making

# The compiler looks at gradients of inner tensors; ranks that are threads undo its filter.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()  # pyright: ignore
    yield
    torch._dynamo.reset()  # pyright: ignore


def counting(graphs: list[Any]) -> Any:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def note(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=note, bw_compiler=note)


@pytest.mark.parametrize(
    ("way", "compiled"),
    [
        ("gathered", "block before"),
        ("shared", "block after"),
        ("shared", "forward"),
        ("gathered", "module around"),
    ],
)
def test_compiled_blocks_train_as_on_one_rank(way: str, compiled: str) -> None:
    """`block.compile()` before or after `fully_shard`; a compiled `forward`; a wrapped module."""
    graphs: list[Any] = []
    backend = counting(graphs)

    def make() -> Net:
        model = made()
        with making:  # the ranks are threads of one compiler
            for number, block in enumerate(model.blocks):
                around: Any = torch.compile(block, backend=backend)
                model.blocks[number] = around
        return model

    def prepare(model: Net) -> None:
        with making:
            for block in model.blocks:
                if compiled == "block before":
                    block.compile(backend=backend)
                elif compiled == "forward":
                    block.forward = torch.compile(block.forward, backend=backend)
        for block in model.blocks:
            fully_shard(block)
            if compiled == "block after":
                block.compile(backend=backend)
        fully_shard(model)

    compare(way, 2, prepare=prepare, make=make if compiled == "module around" else made)
    assert len(graphs) >= 4
