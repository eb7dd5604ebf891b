"""Operators on DTensors by brute force; `benchmarks/operators.py` runs all of torch's database."""

from __future__ import annotations

import warnings

import pytest
import torch

from dure.errors import PlacementError
from dure.tensor import Partial, Replicate, Shard
from ranks.operators import CRASHED, REFUSED, RIGHT, WRONG, Sample, check, database, ways

FAMILIES = {
    "views": "view reshape flatten ravel unflatten permute transpose t movedim squeeze unsqueeze "
    "expand broadcast_to swapaxes view_as mT adjoint",
    "parts": "split split_with_sizes chunk unbind select slice narrow unfold diagonal hsplit",
    "inverses": "select_scatter slice_scatter diagonal_scatter constant_pad_nd diag_embed",
    "indexing": "gather scatter scatter_add scatter_reduce index_select index_add index_copy "
    "index_fill index_put __getitem__ take_along_dim masked_select",
    "along": "sort topk cumsum cumprod cummax flip roll repeat tril triu cat stack renorm",
    "pointwise": "add sub mul div neg exp sigmoid where clamp pow maximum masked_fill",
    "products": "mm bmm addmm baddbmm matmul mv dot",
    "reductions": "sum mean amax max min argmax any all var logsumexp linalg.vector_norm",
    "statistics": "prod std_mean var_mean median kthvalue aminmax nansum norm item equal allclose",
    "space": "nn.functional.conv2d nn.functional.conv_transpose2d nn.functional.max_pool2d "
    "nn.functional.avg_pool2d nn.functional.adaptive_avg_pool2d nn.functional.interpolate",
    "softmax": "softmax log_softmax nn.functional.cross_entropy nn.functional.nll_loss",
    "losses": "nn.functional.mse_loss nn.functional.huber_loss nn.functional.smooth_l1_loss "
    "nn.functional.binary_cross_entropy nn.functional.binary_cross_entropy_with_logits "
    "nn.functional.soft_margin_loss nn.functional.kl_div",
    "layers": "nn.functional.layer_norm nn.functional.group_norm nn.functional.rms_norm "
    "nn.functional.embedding nn.functional.scaled_dot_product_attention",
}


def failures(names, sizes, most, drawn, terms=False):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = [sample for _, sample in database(names, most)]
    assert samples
    tries = [(s, way) for s in samples for way in ways(s, sizes, drawn, terms)]
    return [str(result) for result in check(tries, sizes) if result.outcome != RIGHT]


on_two_meshes = pytest.mark.parametrize("sizes", [(3,), (2, 2)], ids=["3", "2x2"])


@pytest.mark.parametrize("family", FAMILIES)
@on_two_meshes
def test_families(family, sizes):
    drawn = 10 if family == "indexing" else 5  # its operators have most tensors
    assert failures(FAMILIES[family].split(), sizes, most=3, drawn=drawn, terms=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@on_two_meshes
def test_families_in_more_ways(family, sizes):
    assert failures(FAMILIES[family].split(), sizes, most=3, drawn=10, terms=True) == []


def reshaped(*shapes):
    def run(x):
        for shape in shapes:
            x = x.reshape(shape)
        return x * 2

    return run


def linear(x, weight):
    """As torch computes it: rows flattened, a product, rows unflattened."""
    return (x.flatten(0, 1) @ weight).unflatten(0, x.shape[:2])


def heads(x):
    split = x.view(*x.shape[:2], 4, -1).transpose(1, 2)
    return split.reshape(x.shape[0] * 4, x.shape[1], -1) * 2


RESHAPES = [
    ((4, 6), [(24,), (8, 3)]),
    ((24,), [(4, 6), (24,)]),
    ((24,), [(2, 2, 6), (4, 6)]),
    ((2, 4, 6), [(48,), (8, 6)]),
    ((4, 4, 3), [(16, 3), (2, 8, 3)]),
    ((8, 8), [(64,), (4, 16)]),
    ((3, 5), [(15,), (5, 3)]),
    ((0, 4), [(4, 0)]),
    ((1, 4), [(4,), (1, 4, 1)]),
    ((12,), [(6, 2), (3, 2, 2), (12,)]),
    ((2, 6, 2), [(12, 2), (24,)]),
    ((36,), [(6, 6), (36,), (4, 9)]),
]


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (2, 3), (2, 1, 2)], ids=str)
def test_reshapes_of_reshapes(sizes):
    """Cuts of several axes through dimensions that are flattened and split, in every order."""
    samples = [
        Sample(f"{shape} {to}", reshaped(*to), (torch.randn(shape, requires_grad=True),))
        for shape, to in RESHAPES
    ]
    for shape in [(4, 4, 6), (3, 4, 2), (2, 8, 3)]:
        x, weight = torch.randn(shape, requires_grad=True), torch.randn(shape[2], 4)
        samples.append(Sample(f"linear {shape}", linear, (x, weight)))
    for shape in [(2, 4, 8), (4, 3, 8)]:
        samples.append(Sample(f"heads {shape}", heads, (torch.randn(shape),)))
    assert all(sample.expect() for sample in samples)
    tries = [(s, way) for s in samples for way in ways(s, sizes, 20)]
    assert [str(result) for result in check(tries, sizes) if result.outcome != RIGHT] == []


def test_the_checker_tells_apart():
    """What it says of operators that are right, wrong, refused, and broken on one rank."""

    def wrong(x):
        return x * (1 + x.to_local().shape[0]) if hasattr(x, "to_local") else x * 5

    def refused(x):
        if hasattr(x, "to_local"):
            raise PlacementError("no")
        return x

    def broken(x):
        if hasattr(x, "to_local") and x.to_local().shape[0] == 1:
            raise ValueError("not here")
        return x.full_tensor() if hasattr(x, "to_local") else x

    def run(fn, placement):
        sample = Sample("sample", fn, (torch.arange(5.0) + 1,))
        assert sample.expect()
        return [r.outcome for r in check([(sample, ((placement,),))], (3,))]

    assert run(torch.exp, Shard(0)) == [RIGHT]
    assert run(torch.relu, Partial("sum")) == [RIGHT]
    assert run(wrong, Shard(0)) == [WRONG]
    assert run(refused, Replicate()) == [REFUSED]
    assert run(broken, Shard(0)) == [CRASHED]
