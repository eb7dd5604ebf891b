"""Matrix products and linear layers: what they are, and that nothing is gathered."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

import pytest
import torch
import torch.nn.functional as F

from dure.tensor import DTensor, Partial, Replicate, Shard
from dure.tensor.debug import CommDebugMode
from tests.tensor.ranks.operators import check, placed
from tests.tensor.ranks.parts import made
from tests.thread_ranks import on_mesh

torch.manual_seed(0)


def random(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_a_row_wise_layer_moves_no_weight():
    x, weight, bias = random(5, 6), random(3, 6), random(3)
    check(F.linear, x, weight, bias)
    columns = [Shard(1)]
    assert placed(F.linear, (x, columns), (weight, columns), (bias, [Replicate()])) == [[Partial()]]


@pytest.mark.parametrize("cuts", [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(1), Shard(1))])
@on_mesh(2, 2)
def test_a_linear_of_rows_cut_twice_sends_nothing(mesh, cuts):
    """Rows are flattened to a strided shard, which goes through products, and unflattened again."""

    x = made(mesh, torch.ones(4, 8, 3).requires_grad_(), cuts)
    weight = made(mesh, torch.ones(5, 3).requires_grad_(), [Replicate(), Replicate()])
    with CommDebugMode() as mode:
        y = F.gelu(F.linear(x, weight, weight.sum(1)))
        (y * y).sum().backward()
    assert mode.get_total_counts() == 0
    assert y.placements == x.grad.placements == cuts


# ---- kernels of low precision --------------------------------------------------------------------

F8 = torch.float8_e4m3fn


def whole(*shape, dtype=torch.float32, most=2):
    """Return whole numbers, so that sums are exact."""
    return torch.randint(-most, most + 1, shape).to(dtype)


def test_a_product_of_int8():
    check(torch._int_mm, whole(128, 64, dtype=torch.int8), whole(64, 64, dtype=torch.int8))
    left, right = whole(64, 32, dtype=torch.int8), whole(32, 32, dtype=torch.int8)
    for a, b, c in (
        (Shard(0), Replicate(), Shard(0)),
        (Replicate(), Shard(1), Shard(1)),
        (Shard(1), Shard(0), Partial()),
    ):
        assert placed(torch._int_mm, (left, [a]), (right, [b])) == [[c]]


def test_a_product_of_int8_is_cut_into_sizes_that_gpus_take():
    """More than 16 rows for each rank; columns and inner dimension in multiples of 16."""
    check(torch._int_mm, whole(32, 24, dtype=torch.int8), whole(24, 8, dtype=torch.int8))
    rows = whole(32, 24, dtype=torch.int8), [Shard(0)]
    columns = whole(24, 8, dtype=torch.int8), [Shard(1)]
    assert placed(torch._int_mm, rows, columns) == [[Replicate()]]


def scaled(left, right, *scales, **options):
    return torch._scaled_mm(left, right.t(), *scales, out_dtype=torch.bfloat16, **options)


SCALES = {"one": ((), ()), "each row and column": ((128, 1), (1, 64))}


@pytest.mark.parametrize("shapes", SCALES.values(), ids=SCALES)
def test_a_scaled_product_of_float8(shapes):
    scales = [2.0 ** torch.randint(-1, 2, shape) for shape in shapes]
    check(scaled, whole(128, 64, dtype=F8), whole(64, 64, dtype=F8), *scales, meshes=((4,),))


def test_a_scaled_product_with_a_bias():
    def biased(left, right, bias):
        one = left.new_ones((), dtype=torch.float32)
        return scaled(left, right, one, one, bias=bias)

    bias = whole(64, dtype=torch.bfloat16)
    check(biased, whole(32, 64, dtype=F8), whole(64, 64, dtype=F8), bias, meshes=((2,),))


@pytest.mark.parametrize("cut", [0, 1])
def test_scales_are_cut_with_the_rows_and_columns_that_they_scale(cut):
    whole_one, own = [Replicate()], [Shard(cut)]
    rows, columns = whole(64, 32, dtype=F8), whole(32, 32, dtype=F8)
    operands = [
        (rows, own if cut == 0 else whole_one),
        (columns, [Shard(0)] if cut == 1 else whole_one),  # transposed in the call
        (torch.ones(64, 1), own if cut == 0 else whole_one),
        (torch.ones(1, 32), own if cut == 1 else whole_one),
    ]

    def sending_nothing(*tensors):
        with CommDebugMode() as mode:
            found = scaled(*tensors)
        assert mode.get_total_counts() == 0
        return found

    assert placed(sending_nothing, *operands) == [own]


GROUPED = {
    "groups of rows": ((32, 64), (3, 64, 64), [8, 8, 32]),
    "groups of columns": ((3, 64, 64), (64, 32), [8, 24, 32]),
    "groups of the inner dimension": ((64, 32), (32, 64), [8, 24, 32]),
    "a batch": ((4, 64, 64), (4, 64, 64), None),
}


@pytest.mark.parametrize("name", GROUPED)
def test_a_product_for_each_group(name):
    left, right, ends = GROUPED[name]
    operands = [whole(*shape, dtype=torch.bfloat16, most=1) for shape in (left, right)]
    if ends is not None:
        operands.append(torch.tensor(ends, dtype=torch.int32))

    def grouped(a, b, offs=None):
        return torch._grouped_mm(a, b, offs=offs)

    check(grouped, *operands, meshes=((4,),))


def test_experts_are_cut_by_columns_and_inner_dimension():
    rows, ends = whole(32, 64, dtype=torch.bfloat16), torch.tensor([8, 32], dtype=torch.int32)
    experts = whole(2, 64, 64, dtype=torch.bfloat16)

    def grouped(a, b, offs):
        return torch._grouped_mm(a, b, offs=offs)

    for a, b, product in (
        (Replicate(), Shard(2), Shard(1)),
        (Shard(1), Shard(1), Partial()),
    ):
        assert placed(grouped, (rows, [a]), (experts, [b]), (ends, [Replicate()])) == [[product]]


# ---- scaled groups, with a kernel for the CPU in the place of a GPU's ----------------------------


def scaled_groups(
    left, right, rows, columns, offs=None, bias=None, scale=None, out_dtype=None, fast=False
):
    """Scale first, then multiply; refuse layouts that GPUs refuse."""
    assert left.is_contiguous() and right.transpose(-2, -1).is_contiguous()
    a = (left.float() * rows.unsqueeze(-1)).bfloat16()
    b = (right.float() * columns.unsqueeze(-2)).bfloat16()
    return torch._grouped_mm(a, b, offs=offs)


@pytest.fixture
def kernel():
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_grouped_mm", scaled_groups, "CPU")
    yield
    library._destroy()


SCALED_GROUPS = {
    "groups of rows": ((32, 64), (3, 64, 64), [8, 8, 32], (32,), (3, 64)),
    "groups of columns": ((3, 64, 64), (64, 32), [8, 24, 32], (3, 64), (32,)),
    "a batch": ((4, 64, 64), (4, 64, 64), None, (4, 64), (4, 64)),
    "a batch that does not divide": ((3, 64, 64), (3, 64, 64), None, (3, 64), (3, 64)),
}


def grouped_of(ends):
    offs = None if ends is None else torch.tensor(ends, dtype=torch.int32)

    def grouped(a, b, rows, columns):
        ends = offs
        if isinstance(a, DTensor) and offs is not None:
            ends = made(a.device_mesh, offs, [Replicate()] * a.device_mesh.ndim)
        b = b.transpose(-2, -1)  # stored by columns
        return torch._scaled_grouped_mm(a, b, rows, columns, ends, out_dtype=torch.bfloat16)

    return grouped


@pytest.mark.parametrize("name", SCALED_GROUPS)
def test_a_scaled_product_for_each_group(kernel, name):
    left, right, ends, *shapes = SCALED_GROUPS[name]
    transposed = (*right[:-2], right[-1], right[-2])
    scales = [2.0 ** torch.randint(-1, 2, shape) for shape in shapes]
    operands = whole(*left, dtype=F8, most=1), whole(*transposed, dtype=F8, most=1)
    check(grouped_of(ends), *operands, *scales, meshes=((4,),))


@pytest.mark.parametrize(
    ("name", "cuts", "product"),
    [
        ("groups of rows", (None, 1, None, 1), Shard(1)),
        ("groups of rows", (1, 2, None, None), Partial()),
        ("groups of columns", (1, None, 1, None), Shard(0)),
        ("a batch", (0, 0, 0, 0), Shard(0)),
        ("a batch", (1, None, 1, None), Shard(1)),
        ("a batch", (None, 1, None, 1), Shard(2)),
    ],
)
def test_scaled_groups_are_not_gathered(kernel, name, cuts, product):
    left, right, ends, *shapes = SCALED_GROUPS[name]
    transposed = (*right[:-2], right[-1], right[-2])
    tensors = whole(*left, dtype=F8), whole(*transposed, dtype=F8), *map(torch.ones, shapes)
    places = [[Replicate() if cut is None else Shard(cut)] for cut in cuts]
    function = grouped_of(ends)

    def sending_nothing(*given):
        with CommDebugMode() as mode:
            found = function(*given)
        assert mode.get_total_counts() == 0
        return found

    assert placed(sending_nothing, *zip(tensors, places, strict=True)) == [[product]]
