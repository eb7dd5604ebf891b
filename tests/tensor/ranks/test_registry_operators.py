"""Operators on DTensors by brute force; `benchmarks/operators.py` runs all of torch's database."""

import warnings

import pytest
import torch

from dure.errors import PlacementError
from dure.tensor import Partial, Replicate, Shard
from tests.tensor.ranks.operators import (
    CRASHED,
    REFUSED,
    RIGHT,
    WRONG,
    Sample,
    database,
    failures,
    outcomes,
    ways,
)

FAMILIES = {
    "views": "view reshape flatten ravel unflatten permute transpose t movedim squeeze unsqueeze "
    "expand broadcast_to swapaxes view_as mT adjoint",
    "parts": "split split_with_sizes chunk unbind select slice narrow unfold diagonal hsplit",
    "inverses": "select_scatter slice_scatter diagonal_scatter constant_pad_nd diag_embed",
    "indexing": "gather scatter scatter_add scatter_reduce index_select index_add index_copy "
    "index_fill index_put __getitem__ take_along_dim masked_select",
    "along": "sort topk cumsum cumprod cummax flip roll repeat tril triu cat stack renorm",
    "pointwise": "add sub mul div neg exp sigmoid where clamp pow maximum masked_fill "
    "addcmul lerp lt abs",
    "products": "mm bmm addmm baddbmm matmul mv dot einsum",
    "reductions": "sum mean amax max min argmax any all var logsumexp linalg.vector_norm",
    "statistics": "prod std_mean var_mean median kthvalue aminmax nansum norm item equal allclose "
    "count_nonzero nonzero",
    "space": "nn.functional.conv2d nn.functional.conv_transpose2d nn.functional.max_pool2d "
    "nn.functional.avg_pool2d nn.functional.adaptive_avg_pool2d nn.functional.interpolate",
    "softmax": "softmax log_softmax nn.functional.cross_entropy nn.functional.nll_loss",
    "losses": "nn.functional.mse_loss nn.functional.huber_loss nn.functional.smooth_l1_loss "
    "nn.functional.binary_cross_entropy nn.functional.binary_cross_entropy_with_logits "
    "nn.functional.soft_margin_loss nn.functional.kl_div",
    "layers": "nn.functional.layer_norm nn.functional.group_norm nn.functional.rms_norm "
    "nn.functional.embedding",
}


def assert_right(names, sizes, most, drawn):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = [sample for _, sample in database(names, most)]
    assert samples
    tries = [(s, way) for s in samples for way in ways(s, sizes, drawn, partial=True)]
    assert failures(tries, sizes) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    many = family == "indexing"  # its operators have most tensors, and so most ways
    assert_right(FAMILIES[family].split(), (2, 2), 3 if many else 2, 6 if many else 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [(3,), (2, 2)], ids=["3", "2x2"])
def test_families_in_more_ways(family, sizes):
    assert_right(FAMILIES[family].split(), sizes, most=3, drawn=10)


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
        sample = Sample("sample", fn, (torch.arange(5.0) + 1,)).compute()
        return [r.outcome for r in outcomes([(sample, ((placement,),))], (3,))]

    assert run(torch.exp, Shard(0)) == [RIGHT]
    assert run(torch.relu, Partial("sum")) == [RIGHT]
    assert run(wrong, Shard(0)) == [WRONG]
    assert run(refused, Replicate()) == [REFUSED]
    assert run(broken, Shard(0)) == [CRASHED]
