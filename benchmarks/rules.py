"""Writes the table of rules into docs/dtensor.md, between its markers.

    python benchmarks/rules.py [--check]

Rows come from the registry and from doing: each example below is run on plain tensors, which tells
the operators that it calls; the rule of each is asked what it allows on one mesh axis; and each is
run on two thread-ranks with one operand sharded, the others whole, to see what is communicated. An
operator whose rule no example reaches is an error, unless torch tags it as pointwise. `--check`
writes nothing, and exits with 1 if the page is not what would be written.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from dure.tensor import Partial, Placement, Replicate, Shard, init_device_mesh
from dure.tensor.call import AxisStrategy, Op, OpCall, schema_of
from dure.tensor.registry import Rule, _rules, rule_of
from dure.tensor.rules import attention
from dure.tensor.spec import TensorMeta, spec_of
from dure.tensor.watching import OperationRecorder
from dure.tensor.wrapping import wrap
from dure.testing import run_ranks

PAGE = Path(__file__).parents[1] / "docs" / "dtensor.md"
BEGIN, END = "<!-- rules: benchmarks/rules.py writes this -->", "<!-- end: rules -->"
R = Replicate()

FAMILIES: dict[str, tuple[str, Sequence[str]]] = {
    "views": (
        "Views and shapes",
        (
            "x.t()", "x.permute(1, 0)", "cube.transpose(0, 1)", "x.view(24)", "x.view(2, 2, 6)",
            "cube.view(8, 6)", "x.reshape(24)", "aten._unsafe_view(x, (24,))", "x.unsqueeze(0)",
            "row.squeeze()", "row.squeeze(0)", "aten.squeeze.dims(row, [0])", "row.expand(4, 6)",
            "x.split(2)", "x.split_with_sizes((1, 3))", "x.unbind()", "x[1]", "x[1:3]",
            "x.unfold(0, 2, 1)", "cube.diagonal(0, 1, 2)", "x.detach()", "aten.alias(x)",
            "aten.lift_fresh(x)", "x.view(torch.int32)",
            "torch.view_as_complex(pairs)", "torch.view_as_real(z)",
        ),
    ),
    "pointwise": (
        "Pointwise",
        (
            "x.relu()", "x + 1", "torch.where(mask, x, y)", "x + y", "x.add_(y)", "x - y",
            "x.sub_(y)", "x * y", "x.mul_(y)",
            "aten.add.out(x, y, out=x)", "aten.mul.Scalar(x, 2)", "aten.mul_.Scalar(x, 2)",
            "x / y", "x.div_(y)", "aten.div.Scalar(x, 2)", "aten.div_.Scalar(x, 2)", "-x",
            "x.neg_()", "+x", "x.clone()", "aten.positive(x)", "x.zero_()",
            "torch.zeros_like(x)", "x.masked_fill(mask, 0)", "x.masked_fill_(mask, 0)",
            "x.masked_fill(mask, one)", "x.masked_fill_(mask, one)", "x.fill_(2)",
            "x.fill_(one)", "x.double()", "x.copy_(y)", "x.exp()", "torch.erfc(x)",
            "torch.maximum(x, y)", "torch.minimum(x, y)", "torch.logaddexp(x, y)",
            "x.clamp_min_(0)", "aten.mul.out(x, y, out=x)",
        ),
    ),
    "matmul": (
        "Matrix products",
        ("a @ b", "torch.addmm(bias, a, b)", "torch.bmm(left, right)",
         "torch.baddbmm(added, left, right)", "torch._int_mm(int8, square8)",
         "torch._scaled_mm(float8, float8_square.t(), one, one, out_dtype=torch.bfloat16)",
         "torch._grouped_mm(halves, experts, offs=ends)"),
    ),
    "reductions": (
        "Reductions",
        (
            "x.sum()", "x.sum(0)", "x.nansum()", "x.count_nonzero()", "x.count_nonzero([0])",
            "x.mean()", "x.mean(0)", "x.prod()", "x.prod(0)", "x.amax(0)", "x.amin(0)", "x.max()",
            "x.min()", "x.any()", "x.any(0)", "aten.any.dims(x, [0])", "x.all()", "x.all(0)",
            "aten.all.dims(x, [0])", "torch.aminmax(x)", "x.max(0)", "x.min(0)", "x.argmax(0)",
            "x.argmin(0)", "x.median(0)", "x.nanmedian(0)", "x.kthvalue(1, 0)", "x.mode(0)",
            "x.var(0)", "x.std(0)", "torch.var_mean(x, 0)", "torch.std_mean(x, 0)",
            "torch.linalg.vector_norm(x)",
        ),
    ),
    "along": (
        "Along a dimension",
        (
            "x.flip(0)", "x.roll(1, 0)", "x.sort(dim=0)", "x.sort(dim=0, stable=True)",
            "x.topk(2, 0)", "x.cumsum(0)", "x.cumprod(0)", "x.logcumsumexp(0)", "x.cummax(0)",
            "x.cummin(0)", "x.renorm(2, 0, 1)", "F.pad(x, (1, 1))", "x.repeat(2, 1)", "x.tril()",
            "x.triu()", "torch.cat([x, y])", "torch.stack([x, y])",
            "aten._safe_softmax(x, 0)",
        ),
    ),
    "indexing": (
        "Indexing",
        (
            "x.gather(0, places)", "x.scatter(0, places, y)", "x.scatter(0, places, 1.0)",
            "x.scatter_add(0, places, y)", "aten.scatter.reduce(x, 0, places, y, reduce='add')",
            "aten.scatter.value_reduce(x, 0, places, 1.0, reduce='add')",
            "x.scatter_reduce(0, places, y, 'amax')",
            "x.index_select(0, index)", "x.index_add(0, index, y)", "x.index_copy(0, index, y)",
            "x.index_reduce(0, index, y, 'amax')", "x.index_fill(0, index, 1.0)",
            "x.index_fill(0, index, one)", "x[index]", "aten._unsafe_index.Tensor(x, [index])",
            "x.index_put((index,), y)", "aten._unsafe_index_put(x, [index], y)",
            "x[1]", "x.select_scatter(v, 0, 1)", "x[1:3]", "x.slice_scatter(y, 0)",
            "cube.diagonal(0, 1, 2)", "x.diagonal_scatter(line)", "x.unfold(0, 2, 1)",
        ),
    ),
    "embedding": ("Embedding", ("F.embedding(tokens, table)",)),
    "normalisation": (
        "Normalisation",
        (
            "F.layer_norm(cube, (6,), v, v)", "aten._fused_rms_norm(cube, [6], v, 1e-6)",
            "F.group_norm(image, 2, four, four)",
            "F.batch_norm(image, mean, var, four, four, training=True)",
        ),
    ),
    "softmax": (
        "Softmax and losses",
        (
            "x.softmax(0)", "x.log_softmax(0)", "x.logsumexp(0)",
            "F.mse_loss(x, y)",
            "F.smooth_l1_loss(x, y)", "F.huber_loss(x, y)", "F.soft_margin_loss(x, y01)",
            "F.binary_cross_entropy(half, y01)", "F.binary_cross_entropy_with_logits(x, y01)",
            "F.nll_loss(x, targets)", "F.nll_loss(image, pixels)",
        ),
    ),
    "attention": (
        "Attention",
        ("F.scaled_dot_product_attention(q, k, q)",),
    ),
    "convolution": (
        "Convolution, pooling, resampling",
        (
            "F.conv2d(image, kernel, six)",
            "F.avg_pool2d(image, 2)", "F.adaptive_avg_pool2d(image, 2)", "F.max_pool2d(image, 2)",
            "F.adaptive_max_pool2d(image, 2)", "F.interpolate(image, scale_factor=2)",
            "F.interpolate(image, scale_factor=2, mode='nearest-exact')",
            "F.interpolate(image, scale_factor=2, mode='bilinear')",
            "F.interpolate(image, scale_factor=2, mode='bicubic')",
            "F.interpolate(signal, scale_factor=2)",
            "F.interpolate(signal, scale_factor=2, mode='nearest-exact')",
            "F.interpolate(signal, scale_factor=2, mode='linear')",
            "F.avg_pool3d(volume, 2)", "F.adaptive_avg_pool3d(volume, 2)",
            "F.max_pool3d(volume, 2)", "F.adaptive_max_pool3d(volume, 2)",
            "F.interpolate(volume, scale_factor=2)",
            "F.interpolate(volume, scale_factor=2, mode='nearest-exact')",
            "F.interpolate(volume, scale_factor=2, mode='trilinear')",
        ),
    ),
    "creation": (
        "New tensors like another",
        (
            "torch.empty_like(x)", "torch.ones_like(x)", "torch.full_like(x, 2)",
            "x.new_empty(4, 6)", "x.new_zeros(4, 6)", "x.new_ones(4, 6)", "x.new_full((4, 6), 2)",
            "x.new_empty_strided((4, 6), (6, 1))",
        ),
    ),
}  # fmt: skip
"""For each file of rules/ a title, and examples that between them call all its operators."""

MADE_OF_OTHERS = (
    "F.linear(cube, weight, bias)", "torch.einsum('bij,bjk->bik', left, right)",
    "torch.tensordot(a, b, 1)", "F.cross_entropy(x, targets)", "F.l1_loss(x, y)",
    "F.rms_norm(cube, (6,), v)", "F.dropout(x)", "x.chunk(2)", "x.norm()", "x.std()",
    "torch.outer(v, v)", "F.normalize(x)", "F.one_hot(tokens, 8)", "torch.vstack([x, y])",
)  # fmt: skip
WITHOUT_A_RULE = (
    "torch.linalg.inv_ex(square)", "torch.linalg.eigh(square)", "torch.fft.fft(x)",
    "torch.bincount(tokens)", "torch.unique(tokens)", "torch.histc(x)", "torch.nonzero(x)",
    "torch.cdist(x, x)", "F.grid_sample(image, grid)",
)  # fmt: skip

NOT_ON_CPU = {
    torch.ops.aten._fused_rms_norm_backward.default,
    torch.ops.aten.cudnn_batch_norm.default,
    torch.ops.aten.cudnn_batch_norm_backward.default,
    torch.ops.aten.miopen_batch_norm.default,
    torch.ops.aten._scaled_grouped_mm.default,
    *attention.FORWARD,
    *attention.BACKWARD,
}
NOT_CALLED_BY_FUNCTIONS = {
    torch.ops.aten._native_batch_norm_legit.default,
    torch.ops.aten._native_batch_norm_legit.no_stats,
    torch.ops.aten._native_batch_norm_legit_no_training.default,
    torch.ops.aten._native_batch_norm_legit_functional.default,
    torch.ops.aten._batch_norm_with_update.default,
    torch.ops.aten._batch_norm_with_update_functional.default,
    torch.ops.aten._batch_norm_no_update.default,
    torch.ops.aten.batch_norm_backward.default,
}
"""Graphs of compilers have them in the place of `native_batch_norm`, whose rule they share."""


def tensors() -> dict[str, Any]:
    """Return what the examples are written with."""
    torch.manual_seed(0)
    x = torch.rand(4, 6)
    image = torch.rand(2, 4, 8, 8)
    int8, square = torch.ones(64, 32, dtype=torch.int8), torch.ones(32, 32)
    found: dict[str, Any] = {
        "int8": int8, "square8": square.to(torch.int8), "float8": int8.to(torch.float8_e4m3fn),
        "float8_square": square.to(torch.float8_e4m3fn), "halves": square.to(torch.bfloat16),
        "experts": torch.ones(2, 32, 32, dtype=torch.bfloat16),
        "ends": torch.tensor([16, 32], dtype=torch.int32),
        "x": x, "y": torch.rand(4, 6), "row": torch.rand(1, 6), "v": torch.rand(6),
        "one": torch.tensor(1.0), "line": torch.rand(4), "cube": torch.rand(2, 4, 6),
        "pairs": torch.rand(4, 6, 2), "z": torch.rand(4, 6, dtype=torch.complex64),
        "mask": x > 0.5, "a": torch.rand(4, 6), "b": torch.rand(6, 8), "bias": torch.rand(8),
        "weight": torch.rand(8, 6), "left": torch.rand(2, 4, 6), "right": torch.rand(2, 6, 8),
        "added": torch.rand(2, 4, 8), "places": torch.arange(24).reshape(4, 6) % 4,
        "index": torch.arange(4), "tokens": torch.arange(4), "table": torch.rand(8, 6),
        "image": image, "kernel": torch.rand(6, 4, 3, 3), "six": torch.rand(6),
        "four": torch.rand(4), "signal": torch.rand(2, 4, 8), "volume": torch.rand(2, 4, 4, 4, 4),
        "mean": torch.zeros(4), "var": torch.ones(4), "half": torch.rand(4, 6) / 2,
        "y01": torch.rand(4, 6).round(), "targets": torch.arange(4), "square": torch.eye(4),
        "pixels": torch.zeros(2, 8, 8, dtype=torch.long), "grid": torch.rand(2, 4, 4, 2),
        "q": torch.rand(2, 4, 6, 8), "k": torch.rand(2, 4, 6, 8),
    }  # fmt: skip
    return found | {"torch": torch, "F": torch.nn.functional, "aten": torch.ops.aten}


@dataclass
class Called:
    """A call of an operator on plain tensors.

    Attributes:
        op, args, kwargs: The call.
        example: What a user wrote for it; "" for what autograd called.
        allowed: What its rule allows on one axis, as text.
        moved: What else is done, as text.
    """

    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    example: str
    allowed: str = ""
    moved: str = ""

    @property
    def operands(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return [t for t in tree_flatten((self.args, self.kwargs))[0] if _is_tensor(t)]


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _copied(value: Any) -> Any:
    return tree_map(lambda t: t.detach().clone() if _is_tensor(t) else t, value)


@dataclass
class Calls(TorchDispatchMode):
    """Collects the operators that are called in a block."""

    example: str
    found: list[Called] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        backward = torch._C._current_graph_task_id() != -1  # pyright: ignore
        given = _copied(args), _copied(kwargs or {})
        self.found.append(Called(func, *given, "" if backward else self.example))
        return func(*args, **kwargs or {})


def calls_of(example: str) -> list[Called]:
    """Return the operators that an example calls: forward, backward, and without autograd."""
    named = tensors()
    writes = re.search(r"\w_(\.\w+)?\(|out=", example) is not None
    for value in named.values():
        if _is_tensor(value) and value.is_floating_point() and not writes:
            value.requires_grad_()
    for name in ("y01", "mean", "var"):
        named[name].requires_grad_(False)
    with Calls(example) as calls:
        result = eval(example, named)
        smooth = [t for t in tree_flatten(result)[0] if _is_tensor(t) and t.requires_grad]
        if smooth:
            with suppress(RuntimeError):  # what has no derivative
                torch.autograd.backward(smooth, [torch.ones_like(t) for t in smooth])
    named = tensors()
    with Calls(example) as whole, torch.inference_mode():  # composite operators come undivided
        eval(example, named)
    return calls.found + whole.found


def parts_of(example: str) -> list[Called]:
    """Return the operators that an example calls forward, where torch divides composite ones."""
    named = tensors()
    with Calls(example) as calls, torch.no_grad():
        eval(example, named)
    return calls.found


# ---- what a rule allows --------------------------------------------------------------------------


def allowed(called: Called, mesh: Any) -> str:
    """Return what the rule of an operator allows on one axis."""
    found = rule_of(called.op)
    call = _call(called, mesh)
    assert found is not None
    if found.all_axes:
        ways = [_reshaped(found, call, Shard(dim)) for dim in range(call.operands[0].ndim)]
        told = [f"{way.inputs[0]} → {way.outputs[0]}" for way in ways if way is not None]
        return ", ".join(f"`{way}`" for way in (*told, "P → P"))
    return ", ".join(f"`{way}`" for way in _written(found.strategies(call)))


def _reshaped(found: Rule, call: OpCall, given: Placement) -> AxisStrategy | None:
    """Return what a placement becomes that goes along through a view; None if it is moved."""
    spec = call.operands[0].with_placements([given])
    (way,) = found.strategies(replace(call, operands=(spec,)))
    return AxisStrategy((given,), way.outputs[0]) if way.inputs[0] == (given,) else None


def _call(called: Called, mesh: Any) -> OpCall:
    specs: list[Any] = []
    places: list[Any] = []
    given = [(n, a) for n, a in (*enumerate(called.args), *called.kwargs.items())]
    for where, arg in given:
        for inside, one in enumerate(arg) if isinstance(arg, (list, tuple)) else ((None, arg),):
            if _is_tensor(one):
                specs.append(spec_of(mesh, (R,), TensorMeta.of(one)))
                places.append((where, inside))
    bare, named = tree_map(
        lambda t: spec_of(mesh, (R,), TensorMeta.of(t)) if _is_tensor(t) else t,
        (called.args, called.kwargs),
    )
    results = tree_flatten(called.op(*_copied(called.args), **_copied(called.kwargs)))[0]
    metas = tuple(TensorMeta.of(t) if _is_tensor(t) else None for t in results)
    return OpCall(called.op, tuple(bare), named, tuple(specs), tuple(places), metas)


def _written(strategies: Sequence[AxisStrategy]) -> list[str]:
    """Return ways as text: those of all dimensions, or all kinds of terms, as one."""
    cuts: dict[str, list[int]] = {}
    terms: dict[str, list[str]] = {}
    for way in strategies:
        dims = {p.dim for p in (*way.inputs, *way.outputs) if isinstance(p, Shard)}
        kinds = {p.reduce_op for p in way.inputs if isinstance(p, Partial)}
        text = f"{_listed(way.inputs)} → {_listed(dict.fromkeys(way.outputs))}"
        if len(kinds) == 1 and not dims:
            kind = kinds.pop()
            terms.setdefault(text.replace(f"P({kind})", "P"), []).append(kind)
        elif len(dims) == 1 and not kinds:
            dim = dims.pop()
            cuts.setdefault(text.replace(f"S({dim})", "S(d)"), []).append(dim)
        else:
            cuts.setdefault(text, [])
    found: list[str] = []
    for text, dims in cuts.items():
        one = len(dims) < 2
        found.append(text.replace("S(d)", f"S({dims[0]})") if dims and one else text)
        if not one:
            found[-1] += f", d = {', '.join(map(str, sorted(set(dims))))}"
    for text, kinds in terms.items():
        found.append(text if len(kinds) == 5 else f"{text} ({', '.join(kinds)})")
    return list(dict.fromkeys(found))


def _listed(placements: Any) -> str:
    return ", ".join(map(str, placements))


# ---- what is communicated ------------------------------------------------------------------------


def see(called: list[Called]) -> None:
    """Find what is allowed, and what is communicated where one operand is sharded."""

    def body(rank: int) -> list[tuple[str, str]]:
        mesh = init_device_mesh("cpu", (2,))
        return [
            (
                allowed(one, mesh) if rule_of(one.op) is not None else "",
                _moves(one, mesh, rank) if one.example else "",
            )
            for one in called
        ]

    found = run_ranks(2, body, timeout=120)[0]
    for one, texts in zip(called, found, strict=True):
        one.allowed, one.moved = texts


def _moves(called: Called, mesh: Any, rank: int) -> str:
    operands, names = called.operands, _names(called)
    done: dict[str, list[str]] = {}
    for number, tensor in enumerate(operands):
        for dim in (dim for dim, size in enumerate(tensor.shape) if size > 1):
            told = _run(called, mesh, rank, number, Shard(dim))
            if told:
                who = f"{names[number]} S({dim})" if len(operands) > 1 else f"S({dim})"
                done.setdefault(told, []).append(f"`{who}`")
    return "; ".join(f"{', '.join(who)}: {what}" for what, who in done.items())


def _names(called: Called) -> list[str]:
    """Return the names of the arguments that are tensors."""
    found: list[str] = []
    given = (*zip(schema_of(called.op).names, called.args, strict=False), *called.kwargs.items())
    for name, arg in given:
        leaves = tree_flatten(arg)[0]
        found += [name] * sum(map(_is_tensor, leaves))
    return found


def _run(called: Called, mesh: Any, rank: int, number: int, placement: Placement) -> str:
    """Run an operator with one operand sharded; return what was communicated, as text."""
    count = iter(range(len(called.operands)))

    def made(tensor: torch.Tensor) -> Any:
        lies = placement if next(count) == number else R
        part = tensor
        if isinstance(lies, Shard):
            part = tensor.chunk(2, lies.dim)[rank]
        return wrap(part.contiguous().clone(), spec_of(mesh, (lies,), TensorMeta.of(tensor)))

    args, kwargs = tree_map(lambda t: made(t) if _is_tensor(t) else t, (called.args, called.kwargs))
    with torch.no_grad(), OperationRecorder() as watch:
        try:
            called.op(*args, **kwargs)
        except Exception as error:
            return f"refused ({type(error).__name__})"
    told: list[str] = []
    for one in watch.operations:
        for step in one.steps:
            to = step.after.placements[0]
            told.append(step.move.value + (f" to `{to}`" if isinstance(to, Shard) else ""))
        told += one.plain
    return ", ".join(dict.fromkeys(told))


# ---- the page ------------------------------------------------------------------------------------


def table(rows: Sequence[Called]) -> list[str]:
    """Return a table: operators of one rule in one row where it says the same of them."""
    merged: list[list[Called]] = []
    for row in rows:
        for members in merged:
            first = members[0]
            alike = row.moved == first.moved or _maker(row.op) == _maker(first.op)
            if row.allowed == first.allowed and alike and bool(row.example) == bool(first.example):
                members.append(row)
                break
        else:
            merged.append([row])
    lines = [
        "| Operators, and an example | Go in → come out, nothing sent | Otherwise |",
        "| --- | --- | --- |",
    ]
    for members in merged:
        first = members[0]
        names = ", ".join(dict.fromkeys(f"`{_short(one.op)}`" for one in members))
        example = f": `{first.example}`" if first.example else ""
        lines.append(f"| {names}{example} | {first.allowed} | {first.moved} |")
    return lines


def _maker(op: Op) -> Any:
    """Return the function that is an operator's rule."""
    found = rule_of(op)
    return found and (found.strategies.__module__, found.strategies.__qualname__)


def _short(op: Op) -> str:
    return str(op).removeprefix("aten.").split(".")[0]


def rows_of(family: str, examples: Sequence[str]) -> list[Called]:
    """Return a call of each operator of a family; of a view rule one for each example."""
    found: dict[Any, Called] = {}
    for example in examples:
        for one in calls_of(example):
            maker = _maker(one.op)
            if maker is None or not maker[0].endswith("." + family):
                continue
            if one.op not in _rules and _short(one.op) not in example:
                continue  # pointwise by torch's tag, and not what the example is of
            found_rule = rule_of(one.op)
            key = (one.op, one.example if found_rule and found_rule.all_axes else "")
            if key not in found or (one.example and not found[key].example):
                found[key] = one
    return list(found.values())


def _is_pointwise(op: Op) -> bool:
    """Tell whether torch tags an operator so, or the one that it is a form of: `relu.out`."""
    name = op._schema.name.removeprefix("aten::").removesuffix("_")
    base = getattr(getattr(torch.ops.aten, name), "default", op)
    return torch.Tag.pointwise in {*op.tags, *base.tags}


def rendered() -> str:
    """Return the text between the markers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what has no rule says so, and torch has words on some
        families = {name: rows_of(name, examples) for name, (_, examples) in FAMILIES.items()}
        without = [one for text in WITHOUT_A_RULE for one in parts_of(text)[-1:]]
        made = {text: parts_of(text) for text in MADE_OF_OTHERS}
        see([one for rows in (*families.values(), without) for one in rows])
    seen = {one.op for rows in families.values() for one in rows}
    pointwise = {op for op in _rules if isinstance(op, Op) and _is_pointwise(op)}
    without_row = (
        set(_rules)
        - seen
        - NOT_ON_CPU
        - NOT_CALLED_BY_FUNCTIONS
        - {torch.Tag.pointwise}
        - pointwise
    )
    missing = sorted(map(str, without_row))
    if missing:
        sys.exit(f"no example calls {', '.join(missing)}: give one in FAMILIES")
    lines: list[str] = []
    for family, rows in families.items():
        lines += [f"### {FAMILIES[family][0]}", "", *table(rows), ""]
    lines += ["### Functions made of others", "", "| Function | Becomes |", "| --- | --- |"]
    for text, parts in made.items():
        names = dict.fromkeys(f"`{_short(one.op)}`" for one in parts)
        lines.append(f"| `{text}` | {', '.join(names)} |")
    lines += [
        "",
        "### Operators without a rule",
        "",
        "| Operator, and an example | Sharded |",
        "| --- | --- |",
    ]
    lines += [f"| `{_short(one.op)}`: `{one.example}` | {one.moved} |" for one in without]
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Return the page with a new table."""
    before, begin, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    assert begin, f"{PAGE} has no markers"
    return f"{before}{BEGIN}\n\n{rendered()}\n{END}{after}"


def main() -> None:
    """Write the page, or check it."""
    old = PAGE.read_text("utf-8")
    new = page(old)
    if "--check" in sys.argv[1:]:
        sys.exit(0 if new == old else "docs/dtensor.md is stale: python benchmarks/rules.py")
    PAGE.write_text(new, "utf-8")


if __name__ == "__main__":
    main()
