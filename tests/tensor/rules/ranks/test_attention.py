"""Scaled dot product attention: fewer heads for keys, causal and given masks."""

import pytest
import torch
import torch.nn.functional as F

from dure.errors import PlacementError
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


# ---- kernels for GPUs, with kernels for the CPU in their place -----------------------------------


def attention_weights(q, k, bias, is_causal, scale):
    """Return weights [b, h, l, m], the logarithms of their sums [b, h, l], and the scale."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q @ k.mT * scale
    scores = scores if bias is None else scores + bias
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores.softmax(-1), scores.logsumexp(-1).float(), scale


def attend_and_sum(q, k, v, bias, is_causal, scale):
    weights, sums, _ = attention_weights(q, k, bias, is_causal, scale)
    return weights @ v, sums


def gradients(grad, q, k, v, bias, is_causal, scale):
    weights, _, scale = attention_weights(q, k, bias, is_causal, scale)
    of_weights = grad @ v.mT
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    of_bias = None if bias is None else of_scores.sum_to_size(bias.shape)
    return of_scores @ k * scale, of_scores.mT @ q * scale, weights.mT @ grad, of_bias


def by_rows(tensor):
    """Store a tensor as [b, l, h, w], as this kernel does."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def state():
    return torch.zeros((), dtype=torch.int64)


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    made = attend_and_sum(q, k, v, None, is_causal, scale)
    seeds = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), q.new_empty(0)
    return *made, None, None, q.shape[2], k.shape[2], *seeds


def flash_backward(grad, q, k, v, out, lse, cq, ck, mq, mk, p, is_causal, s, o, *, scale=None):
    assert (mq, mk) == (q.shape[2], k.shape[2]) and lse.shape == out.shape[:3]
    return gradients(grad, q, k, v, None, is_causal, scale)[:3]


def efficient(q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    out, sums = attend_and_sum(q, k, v, bias, is_causal, scale)
    return by_rows(out), sums, state(), state()


def efficient_backward(
    grad, q, k, v, bias, out, lse, s, o, p, wanted, is_causal=False, *, scale=None
):
    assert lse.shape == out.shape[:3]
    *found, given = gradients(grad, q, k, v, bias, is_causal, scale)
    if given is None:
        return *map(by_rows, found), None
    of_bias = given.new_empty(*given.shape[:-1], 16)[..., : given.shape[-1]]  # rows are padded
    return *map(by_rows, found), of_bias.copy_(given)


def cudnn(q, k, v, bias, compute, p=0.0, is_causal=False, debug=False, *, scale=None):
    out, lse = attend_and_sum(q, k, v, bias, is_causal, scale)
    return out, lse[..., None], None, None, q.shape[2], k.shape[2], state(), state(), None


def cudnn_backward(
    grad, q, k, v, out, lse, s, o, bias, cq, ck, mq, mk, p, is_causal, *, scale=None
):
    return gradients(grad, q, k, v, bias, is_causal, scale)[:3]


@pytest.fixture(scope="module")
def kernels():
    library = torch.library.Library("aten", "IMPL")
    name = "_scaled_dot_product_{}_attention"
    for made in (flash, efficient, cudnn):
        library.impl(name.format(made.__name__), made, "CPU")
    for made in (flash_backward, efficient_backward, cudnn_backward):
        kernel = made.__name__.removesuffix("_backward")
        library.impl(f"{name.format(kernel)}_backward", made, "CPU")
    yield
    library._destroy()


aten = torch.ops.aten
KERNELS = {
    "flash": lambda q, k, v, c: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, c)[0],
    "efficient": lambda q, k, v, c: aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, c
    )[0],
    "cudnn": lambda q, k, v, c: aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, c
    )[0],
}


@pytest.mark.parametrize(
    ("kernel", "causal"), [("flash", True), ("efficient", False), ("cudnn", True)]
)
def test_attention_of_gpu_kernels(kernels, kernel, causal):
    def attend(q, k, v):
        return KERNELS[kernel](q, k, v, causal)

    given = [random(3, 4, 5, 8) for _ in range(3)]
    check(attend, *given, meshes=((4,),))
    for cut in ([Shard(0)], [Shard(1)]):
        assert placed(attend, *((t, cut) for t in given)) == [cut]


def test_attention_of_gpu_kernels_with_a_bias(kernels):
    def attend(q, k, bias):
        return aten._scaled_dot_product_efficient_attention(q, k, k, bias, True)[0]

    for shape in ((2, 4, 5, 3), (1, 4, 5, 3)):
        check(attend, random(2, 4, 5, 8), random(2, 4, 3, 8), random(*shape), meshes=((2,),))


def test_attention_of_gpu_kernels_drops_nothing_out(kernels):
    def attend(q):
        return aten._scaled_dot_product_flash_attention(q, q, q, 0.5)[0]

    with pytest.raises(PlacementError):
        placed(attend, (random(2, 4, 5, 8), [Shard(0)]))
