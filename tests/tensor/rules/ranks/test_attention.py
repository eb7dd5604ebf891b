"""Scaled dot product attention: fewer heads for keys, causal and given masks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dure.tensor import Shard
from tests.tensor.ranks.operators import check, placed

torch.manual_seed(0)


def random(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [4, 2])
def test_attention(heads, causal):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    q, k, v = random(3, 4, 5, 8), random(3, heads, 5, 8), random(3, heads, 5, 8)
    check(attend, q, k, v)
    for cut in ([Shard(0)], [Shard(1)]):  # nothing is gathered
        assert placed(attend, (q, cut), (k, cut), (v, cut)) == [cut]


@pytest.mark.parametrize("shape", [(5, 3), (2, 1, 5, 3), (2, 4, 5, 3)], ids=str)
def test_attention_with_a_mask(shape):
    def attend(q, k, mask):
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)

    check(attend, random(2, 4, 5, 8), random(2, 4, 3, 8), torch.rand(shape) > 0.3)
