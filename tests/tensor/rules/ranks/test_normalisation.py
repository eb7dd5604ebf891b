"""Normalization: batches with running statistics, composite norms; what gathers nothing."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

import pytest
import torch
import torch.nn.functional as F

from dure.errors import PlacementError
from dure.tensor import Partial, Replicate, Shard
from dure.tensor.debug import CommDebugMode
from tests.tensor.ranks.operators import check, placed
from tests.tensor.ranks.parts import made

torch.manual_seed(0)


def random(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(training):
    def norm(x, weight, bias):
        mesh = getattr(x, "device_mesh", None)
        mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        if mesh is not None:
            mean, var = (made(mesh, t, [Replicate()] * mesh.ndim) for t in (mean, var))
        try:
            out = F.batch_norm(x, mean, var, weight, bias, training=training)
        except PlacementError:  # channels are sharded, running statistics are not
            mean, var = (t.redistribute(placements=weight.placements) for t in (mean, var))
            out = F.batch_norm(x, mean, var, weight, bias, training=training)
        return out, mean, var

    check(norm, random(5, 3, 2), random(3), random(3))


@pytest.mark.parametrize("inference", [False, True])
def test_composite_norms_write_their_temporaries(inference):
    # The mean over a sharded dimension is Partial; eps is added to it in place.
    def norm(x):
        with torch.inference_mode(inference):
            return F.rms_norm(x, (6,))

    check(norm, random(4, 6).requires_grad_(not inference), partial=["sum"])


def test_layers_are_not_gathered():
    x, w, rows = random(5, 4), random(4), [Shard(0)]
    norm = lambda x, w: F.layer_norm(x, (4,), w, w)  # noqa: E731
    assert placed(norm, (x, rows), (w, [Replicate()])) == [rows]

    def gradient(x, w):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(norm(x, w).sum(), (x, w))

    assert placed(gradient, (x, rows), (w, [Replicate()])) == [rows, [Partial()]]


# ---- cuDNN's kernels, with kernels for the CPU in their place ------------------------------------

aten = torch.ops.aten


def cudnn(x, weight, bias, mean, var, training, momentum, eps):
    out, saved_mean, saved_var = aten.native_batch_norm(
        x, weight, bias, mean, var, training, momentum, eps
    )
    own = torch.arange(3 if training else 0, dtype=torch.uint8)  # any bytes
    return out, saved_mean, saved_var, own


def cudnn_backward(x, grad, weight, mean, var, saved_mean, saved_var, eps, own):
    assert own.tolist() == [0, 1, 2]
    return aten.native_batch_norm_backward(
        grad, x, weight, mean, var, saved_mean, saved_var, True, eps, [True, True, True]
    )


@pytest.fixture
def kernels():
    library = torch.library.Library("aten", "IMPL")
    library.impl("cudnn_batch_norm", cudnn, "CPU")
    library.impl("cudnn_batch_norm_backward", cudnn_backward, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_cudnn(kernels, training):
    def norm(x, weight, bias, mean, var):
        known = (None, None) if training else (mean, var)
        return aten.cudnn_batch_norm(x, weight, bias, *known, training, 0.1, 1e-5)[0]

    given = random(5, 3, 2), random(3), random(3)
    statistics = torch.rand(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64) + 1
    check(norm, *given, *statistics, meshes=((4,),))


@pytest.mark.parametrize(("training", "cut"), [(True, 1), (False, 1), (False, 0)])
def test_batch_norm_of_cudnn_is_not_gathered(kernels, training, cut):
    of_channels = [Shard(0)] if cut == 1 else [Replicate()]

    def norm(x, weight, mean, var):
        with CommDebugMode() as mode:
            found = aten.cudnn_batch_norm(x, weight, weight, mean, var, training, 0.1, 1e-5)[0]
        assert mode.get_total_counts() == 0
        return found

    x, one = torch.randn(4, 4, 2), torch.ones(4)
    operands = [(x, [Shard(cut)]), *((one, of_channels) for _ in range(3))]
    assert placed(norm, *operands) == [[Shard(cut)]]
