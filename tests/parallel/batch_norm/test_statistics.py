"""Moments of parts of a batch, merged."""

from __future__ import annotations

import pytest
import torch

from dure.parallel.batch_norm.statistics import local_moments, merged


def test_moments_survive_a_mean_that_is_large_against_the_spread() -> None:
    values = torch.randn(64, 1, generator=torch.Generator().manual_seed(0)) + 10000.0
    rows = [local_moments(part) for part in values.split([1, 30, 0, 33])]
    table = torch.stack(
        [torch.cat([m.mean, m.squares, torch.tensor([float(m.count)])]) for m in rows]
    )
    moments = merged(table)
    exact = values.double()
    # A difference of squares has 1e8 in float32, whose spacing is 8: nothing would be left.
    assert moments.squares.item() / 64 == pytest.approx(exact.var(correction=0).item(), rel=1e-4)
    assert moments.mean.item() == pytest.approx(exact.mean().item(), rel=1e-7)
