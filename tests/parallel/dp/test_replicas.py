"""Replicas: what they share with the module, and what they keep."""

import threading

import torch
from torch import nn

from tests.parallel.dp.wrapped import parallel


def test_replicas_share_parameters_and_run_in_their_own_threads() -> None:
    seen: list[tuple[int, int, str]] = []

    class Where(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.append((len(input), self.weight.data_ptr(), threading.current_thread().name))
            self.mark = 1  # an attribute of the replica, which goes with it
            return super().forward(input)

    model = Where(2, 2)
    parallel(model, ["cpu"] * 3)(torch.ones(7, 2))
    assert sorted(rows for rows, _, _ in seen) == [1, 3, 3]
    assert {pointer for _, pointer, _ in seen} == {model.weight.data_ptr()}
    assert len({name for _, _, name in seen}) == 3
    assert not hasattr(model, "mark")
    assert not [t for t in threading.enumerate() if t.name.startswith("dure-replica")]
