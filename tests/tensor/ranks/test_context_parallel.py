"""Context parallelism: attention around a ring against attention on one rank."""

# pyright: reportArgumentType=false, reportOptionalSubscript=false, reportOptionalMemberAccess=false

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
from tests.thread_ranks import on_mesh


def test_a_rank_has_an_early_and_a_late_chunk():
    assert positions_of(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert positions_of(8, 2, 1).tolist() == [2, 3, 4, 5]
    with pytest.raises(ShapeError):
        positions_of(6, 2, 0)


def whole_qkv(heads, groups, length, dtype):
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, heads, length, 4), (2, groups, length, 4), (2, groups, length, 4)]
    return [torch.randn(*s, generator=generator, dtype=dtype) for s in shapes]


def masks_of(kind, causal, length):
    """Return the mask that a rank's part is cut from, and which query may attend to which key."""
    every = torch.ones(2, 1, length, length, dtype=torch.bool)
    if causal:
        every = every.tril()
    if kind == "none":
        return None, every
    if kind == "keys":
        mask = torch.ones(2, 1, 1, length, dtype=torch.bool)
        mask[0, ..., 9:] = False
        mask[1, ..., :2] = False  # under a causal mask the first queries attend to nothing
        return mask, every & mask
    numbers = torch.zeros(2, 1, 1, length, dtype=torch.int64)
    numbers[0, ..., 5:] = 1
    numbers[0, ..., 17:] = 2
    numbers[1, ..., 11:] = 7
    numbers[1, ..., 20:] = -1
    same = (numbers == numbers.transpose(-2, -1)) & (numbers >= 0)
    return numbers, every & same


@pytest.mark.parametrize("n", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "keys", "documents"])
@pytest.mark.parametrize("kernel", [True, False])
def test_attention_and_its_gradients_are_those_of_one_rank(n, causal, kind, kernel, monkeypatch):
    if not kernel:  # as on another device than the CPU
        monkeypatch.setattr("dure.tensor.context_parallel._uses_kernel", lambda q: False)
    length = 24
    whole = whole_qkv(4, 2, length, torch.float64)
    mask, every = masks_of(kind, causal, length)
    wanted = [t.clone().requires_grad_() for t in whole]
    k, v = (t.repeat_interleave(2, 1) for t in wanted[1:])
    scores = (wanted[0] @ k.transpose(-2, -1) / 2).masked_fill(~every, -torch.inf)
    weights = torch.where(every.any(-1, keepdim=True), scores, 0).softmax(-1)
    expected = torch.where(every.any(-1, keepdim=True), weights, 0) @ v
    cotangent = torch.arange(float(expected.numel()), dtype=torch.float64).reshape(expected.shape)
    expected.backward(cotangent)

    def body(rank):
        mesh = init_device_mesh("cpu", (n,))
        at = positions_of(length, n, rank)
        q, k, v = (t[..., at, :].clone().requires_grad_() for t in whole)
        got = ring_attention(
            q, k, v, group=mesh.get_group(), is_causal=causal,
            mask=None if mask is None else mask[..., at],
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


def test_a_batch_is_shifted_padded_and_cut_and_documents_are_kept_apart():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        batch = {
            "input_ids": torch.tensor([[5, 6, 7, 8, 9, 1], [2, 3, 4, 5, 6, 7]]),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0]]),
            "document_ids": torch.tensor([[0, 0, 0, 0, 3, 3], [0] * 6]),
            "kinds": torch.arange(24).reshape(2, 6, 2),
            "name": "a",
        }
        return context_parallel_batch(mesh, batch, pad_token_id=2)

    first, second = run_ranks(2, body)
    # Positions 0, 1, 6, 7 and 2, 3, 4, 5 of 8; the last two are padding.
    assert first["input_ids"].tolist() == [[5, 6, 2, 2], [2, 3, 2, 2]]
    assert first["position_ids"].tolist() == [[0, 1, 0, 0]] * 2
    assert first["labels"].tolist() == [[6, 7, -100, -100], [-100, 4, -100, -100]]
    assert first["attention_mask"].squeeze().tolist() == [[0, 0, -1, -1], [-1, 0, -1, -1]]
    assert first["kinds"][0].tolist() == [[0, 1], [2, 3], [0, 0], [0, 0]]
    assert second["position_ids"].tolist() == [[2, 3, 0, 1], [2, 3, 4, 5]]
    assert second["labels"].tolist() == [[8, -100, 1, -100], [5, 6, -100, -100]]
    assert second["attention_mask"].squeeze().tolist() == [[0, 0, 3, 3], [0, 0, 0, -1]]
    assert [part["tokens"].item() for part in (first, second)] == [7, 7]
    assert [part["name"] for part in (first, second)] == ["a", "a"]
    assert "document_ids" not in first


@on_mesh(2)
def test_unsupported_calls_are_refused(mesh):
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
