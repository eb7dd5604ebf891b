"""Messages between stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dure.testing import run_ranks
from tests.parallel.pipeline.ranks.pipeline_models import (
    LENGTHS,
    SCHEDULES,
    Nested,
    batches,
    dense,
    mse,
    of_lengths,
    of_nested,
    one_process,
    verify_same,
)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
def test_structures_dtypes_and_skips_travel_on_2_ranks(name: str):
    num = 2 * SCHEDULES[name][1]
    torch.manual_seed(1)
    parts = [Nested(i, num) for i in range(num)]
    found = run_ranks(2, of_nested, name, 2, parts, eager_bytes=0)
    verify_same(found, one_process(parts, batches(2), 4))


def test_shapes_may_change_from_microbatch_to_microbatch_on_2_ranks():
    parts = dense(2)
    _, found = run_ranks(2, of_lengths, parts, LENGTHS, eager_bytes=0)
    for lengths, losses in zip(LENGTHS, found, strict=True):
        generator = torch.Generator().manual_seed(sum(lengths))
        data = [torch.randn(n, 6, generator=generator).double() for n in lengths]
        expected = [mse(nn.Sequential(*parts)(x), x.sin()).item() for x in data]
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12, equal_nan=True)
