"""Normalization: batches with running statistics, composite norms; what gathers nothing."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

import pytest
import torch
import torch.nn.functional as F

from dure.errors import PlacementError
from dure.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from dure.tensor.debug import CommDebugMode
from dure.testing import run_ranks
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
    own = torch.full((2 if training else 0,), x.shape[1], dtype=torch.uint8)  # of these channels
    return out, saved_mean, saved_var, own


def cudnn_backward(x, grad, weight, mean, var, saved_mean, saved_var, eps, own):
    assert own.tolist() == [x.shape[1]] * 2
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


def test_backward_of_cudnn_takes_the_memory_of_its_forward(kernels):
    """Whichever placements the gradient has: a rank saves memory about the channels that it has."""

    def gradient(x, weight, grad):
        out = aten.cudnn_batch_norm(x, weight, None, None, None, True, 0.1, 1e-5)
        return aten.cudnn_batch_norm_backward(x, grad, weight, None, None, *out[1:3], 1e-5, out[3])

    x, weight, grad = torch.randn(4, 4, 2), torch.rand(4), torch.randn(4, 4, 2)
    for cut in (Replicate(), Shard(1)):
        of_channels = Shard(0) if cut == Shard(1) else cut
        for of_grad in (Replicate(), Shard(0), Shard(1), Shard(2), Partial()):
            placed(gradient, (x, [cut]), (weight, [of_channels]), (grad, [of_grad]))


def test_backward_of_cudnn_is_not_linear_in_its_input(kernels):
    def gradient(x, grad, weight, mean, invstd, own):
        return aten.cudnn_batch_norm_backward(x, grad, weight, None, None, mean, invstd, 1e-5, own)

    x, grad, weight = torch.randn(4, 4, 2), torch.randn(4, 4, 2), torch.rand(4)
    whole = [(t, [Replicate()]) for t in (weight, torch.zeros(4), torch.ones(4))]
    own = (torch.full((2,), 4, dtype=torch.uint8), [Replicate()])
    found = placed(gradient, (x, [Partial()]), (grad, [Replicate()]), *whole, own)
    assert found == [[Replicate()]] * 3
    found = placed(gradient, (x, [Replicate()]), (grad, [Partial()]), *whole, own)
    assert found == [[Partial()]] * 3


R, CHANNELS = Replicate(), Shard(0)


@pytest.mark.parametrize("op", ["cudnn_batch_norm", "native_batch_norm", "_batch_norm_with_update"])
@pytest.mark.parametrize("of_input", [R, Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("of_statistics", [R, CHANNELS], ids=str)
def test_running_statistics_are_updated_in_place(kernels, op, of_input, of_statistics):
    """Whichever placements they and the input have."""
    x = torch.arange(8.0).view(2, 4)  # means 2, 3, 4, 5; unbiased variances 8
    flags = () if op == "_batch_norm_with_update" else (True,)

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        one, mean = torch.ones(4), torch.zeros(4)
        mean, var = (made(mesh, t.clone(), [of_statistics]) for t in (mean, one))
        weight = made(mesh, one, [R])
        getattr(aten, op)(made(mesh, x, [of_input]), weight, weight, mean, var, *flags, 1.0, 1e-5)
        return mean.full_tensor().tolist(), var.full_tensor().tolist(), mean.placements

    for mean, var, placements in run_ranks(2, body):
        assert (mean, var, placements) == ([2.0, 3.0, 4.0, 5.0], [8.0] * 4, (of_statistics,))


# ---- torch's other operators for batches ---------------------------------------------------------


BATCH_NORMS = {
    "_batch_norm_with_update": lambda op, x, w, b, m, v: op(
        x, w, b, m.clone(), v.clone(), 0.1, 1e-5
    ),
    "_batch_norm_with_update_functional": lambda op, x, w, b, m, v: op(x, w, b, m, v, 0.1, 1e-5),
    "_batch_norm_no_update": lambda op, x, w, b, m, v: op(x, w, b, m, v, 0.1, 1e-5)[0],
    "_native_batch_norm_legit_functional": lambda op, x, w, b, m, v: op(
        x, w, b, m, v, True, 0.1, 1e-5
    ),
    "_native_batch_norm_legit_no_training": lambda op, x, w, b, m, v: op(x, w, b, m, v, 0.1, 1e-5)[
        0
    ],
}


@pytest.mark.parametrize("name", BATCH_NORMS)
def test_batch_norms(name):
    op, call = getattr(aten, name), BATCH_NORMS[name]

    def norm(x, weight, bias, mean):  # both statistics have the same placements
        with torch.no_grad():
            return call(op, x, weight, bias, mean, mean + 1)

    mean = torch.rand(3, dtype=torch.float64)
    check(norm, random(5, 3, 2), random(3), random(3), mean, meshes=((4,),))


@pytest.mark.parametrize("training", [True, False])
def test_backward_of_batch_norm(training):
    def gradient(grad, x, weight, mean):
        var = mean + 1
        own = torch.empty(0, dtype=torch.uint8)
        if isinstance(x, DTensor):
            own = made(x.device_mesh, own, [Replicate()] * x.device_mesh.ndim)
        saved = (mean, var) if training else (None, None)
        masks = [True, True, True]
        with torch.no_grad():
            return aten.batch_norm_backward(
                grad, x, weight, mean, var, *saved, training, 1e-5, masks, own
            )

    given = random(5, 3, 2), random(5, 3, 2), random(3), torch.rand(3, dtype=torch.float64)
    check(gradient, *given, partial=("sum",), meshes=((4,),))


@pytest.mark.parametrize(
    ("name", "cut"), [("_batch_norm_with_update", 1), ("_batch_norm_no_update", 0)]
)
def test_batch_norms_are_not_gathered(name, cut):
    of_channels = [Shard(0)] if cut == 1 else [Replicate()]

    def norm(x, weight, mean, var):
        with CommDebugMode() as mode, torch.no_grad():
            found = getattr(aten, name)(x, weight, weight, mean, var, 0.1, 1e-5)[0]
        assert mode.get_total_counts() == 0
        return found

    x, one = torch.randn(4, 4, 2), torch.ones(4)
    operands = [(x, [Shard(cut)]), *((one.clone(), of_channels) for _ in range(3))]
    assert placed(norm, *operands) == [[Shard(cut)]]
