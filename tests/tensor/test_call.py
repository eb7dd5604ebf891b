"""Functions of torch that stand for an operator call exactly that operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dure.tensor.call import DIRECT

aten = torch.ops.aten
GIVEN: dict[Any, tuple[Any, ...]] = {
    aten.addmm.default: (torch.ones(3), torch.ones(2, 4), torch.ones(4, 3)),
    aten.bmm.default: (torch.ones(1, 2, 3), torch.ones(1, 3, 2)),
    aten.expand.default: (torch.ones(2, 1), [2, 3]),
    aten.mm.default: (torch.ones(2, 3), torch.ones(3, 2)),
    aten.native_layer_norm.default: (torch.ones(2, 3), [3], None, None, 1e-5),
    aten.sum.dim_IntList: (torch.ones(2, 3), [1], True),
    aten.transpose.int: (torch.ones(2, 3), 0, 1),
    aten.unsqueeze.default: (torch.ones(2), 0),
    aten.view.default: (torch.ones(6), [2, 3]),
}


class Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("op", list(DIRECT), ids=str)
def test_a_function_that_stands_for_an_operator_calls_it(op: Any) -> None:
    given = [GIVEN.get(op, (torch.ones(2, 3),))]
    if op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor):
        given = [(torch.ones(2), torch.ones(2)), (torch.ones(2), 2.0), (torch.ones(2), 2)]
    for args in given:
        with torch.inference_mode(False), torch.no_grad(), Called() as called:
            result = DIRECT[op](*args)
        assert called.ops == [op]
        torch.testing.assert_close(result, op(*args))
