"""Context parallelism: attention around a ring against attention on one rank."""

# pyright: reportArgumentType=false, reportOptionalSubscript=false

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dure.errors import MeshError, ShapeError, UsageError
from dure.mesh import init_device_mesh
from dure.tensor.context_parallel import (
    context_parallel,
    context_parallel_batch,
    context_parallel_unshard,
    positions_of,
    ring_attention,
)
from dure.testing import run_ranks


def test_a_rank_has_an_early_and_a_late_chunk():
    assert positions_of(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert positions_of(8, 2, 1).tolist() == [2, 3, 4, 5]
    with pytest.raises(ShapeError):
        positions_of(6, 2, 0)


def whole_qkv(heads, groups, length, dtype):
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, heads, length, 4), (2, groups, length, 4), (2, groups, length, 4)]
    return [torch.randn(*s, generator=generator, dtype=dtype) for s in shapes]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_and_its_gradients_are_those_of_the_whole(n, causal, masked):
    length = 24
    whole = whole_qkv(4, 2, length, torch.float64)
    mask = torch.ones(2, 1, 1, length, dtype=torch.bool)
    if masked:
        mask[0, ..., 9:] = False
        mask[1, ..., :1] = causal  # the first position must see itself
    wanted = [t.clone().requires_grad_() for t in whole]
    k, v = (t.repeat_interleave(2, 1) for t in wanted[1:])
    every = mask.expand(2, 1, length, length)
    if causal:
        every = every & torch.ones(length, length, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(wanted[0], k, v, attn_mask=every)
    cotangent = torch.arange(float(expected.numel()), dtype=torch.float64).reshape(expected.shape)
    expected.backward(cotangent)

    def body(rank):
        mesh = init_device_mesh("cpu", (n,))
        at = positions_of(length, n, rank)
        q, k, v = (t[..., at, :].clone().requires_grad_() for t in whole)
        got = ring_attention(
            q, k, v, group=mesh.get_group(), is_causal=causal,
            key_mask=mask[..., at] if masked else None,
        )  # fmt: skip
        got.backward(cotangent[..., at, :])
        torch.testing.assert_close(got, expected[..., at, :].detach())
        for own, one in zip((q, k, v), wanted, strict=True):
            torch.testing.assert_close(own.grad, one.grad[..., at, :])
        (again,) = context_parallel_unshard(mesh, [got], [2])
        torch.testing.assert_close(again, expected.detach())

    run_ranks(n, body)


def test_within_the_block_buffers_are_parts_and_attention_sees_all():
    q, k, v = whole_qkv(2, 2, 16, torch.float32)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        buffers = [t.clone() for t in (q, k, v)]
        freed = torch.arange(16.0)
        with context_parallel(
            mesh,
            buffers=[*buffers, freed],
            buffer_seq_dims=[2, 2, 2, 0],
            no_restore_buffers={freed},
        ):
            assert freed.tolist() == positions_of(16, 2, rank).tolist()
            got = F.scaled_dot_product_attention(*buffers, is_causal=True)
            assert got.shape == (2, 2, 8, 4)
        assert all(torch.equal(a, b) for a, b in zip(buffers, (q, k, v), strict=True))
        assert len(freed) == 8
        torch.testing.assert_close(context_parallel_unshard(mesh, [got], [2])[0], expected)

    run_ranks(2, body)


def test_a_batch_is_shifted_padded_and_cut():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        ids = torch.tensor([[5, 6, 7, 8, 9, 1], [5, 6, 7, 0, 0, 0]])
        mask = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])
        return context_parallel_batch(mesh, {"input_ids": ids, "attention_mask": mask})

    first, second = run_ranks(2, body)
    # Positions 0, 1, 6, 7 and 2, 3, 4, 5 of 8; the last two are padding.
    assert first["input_ids"].tolist() == [[5, 6, 0, 0], [5, 6, 0, 0]]
    assert first["labels"].tolist() == [[6, 7, -100, -100], [6, 7, -100, -100]]
    assert first["attention_mask"].squeeze().tolist() == [[True, True, False, False]] * 2
    assert second["input_ids"].tolist() == [[7, 8, 9, 1], [7, 0, 0, 0]]
    assert second["labels"].tolist() == [[8, 9, 1, -100], [-100, -100, -100, -100]]
    assert second["position_ids"].tolist() == [[2, 3, 4, 5]] * 2
    assert second["attention_mask"].squeeze().tolist() == [[True] * 4, [True, False, False, False]]


def test_what_a_ring_cannot_do_is_refused():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        q, k, v = whole_qkv(2, 1, 8, torch.float32)
        with pytest.raises(MeshError), context_parallel(init_device_mesh("cpu", (2, 1))):
            pass
        with pytest.raises(UsageError), context_parallel(mesh, buffers=[q]):
            pass
        with pytest.raises(ShapeError), context_parallel(mesh, buffers=[q], buffer_seq_dims=[1]):
            pass
        with context_parallel(mesh):
            for wrong in (
                {"dropout_p": 0.5, "enable_gqa": True},
                {"attn_mask": torch.ones(8, 8, dtype=torch.bool), "enable_gqa": True},
                {"attn_mask": torch.zeros(2, 1, 1, 8), "enable_gqa": True},
                {},
            ):
                with pytest.raises((UsageError, ShapeError)):
                    F.scaled_dot_product_attention(q, k, v, **wrong)

    run_ranks(2, body)
