"""Reductions, and the dtypes for which each is defined."""

from __future__ import annotations

from typing import ClassVar

import torch

from dure.errors import DtypeError, UsageError


class ReduceOp:
    """A reduction: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, or a premultiplied sum.

    The members are objects, so that `premul_sum(factor)` can carry its factor. Compare with `==`.
    Reductions run in the order of the ranks; 16 and 8 bit floats accumulate in float32 and are
    rounded once (over nccl, floats of 16 bits as NCCL does). MIN and MAX propagate NaN. Sums and
    products of integers wrap around; averages of integers are truncated towards zero.

    Example:
        ```python
        largest = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        assert largest.item() == 1.0
        ```
    """

    __slots__ = ("code", "factor", "name")

    SUM: ClassVar[ReduceOp]
    AVG: ClassVar[ReduceOp]
    PRODUCT: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    BAND: ClassVar[ReduceOp]
    BOR: ClassVar[ReduceOp]
    BXOR: ClassVar[ReduceOp]
    PREMUL_SUM: ClassVar[ReduceOp]

    def __init__(self, name: str, code: int, factor: object = None) -> None:
        self.name, self.code, self.factor = name, code, factor

    @staticmethod
    def premul_sum(factor: float | torch.Tensor) -> ReduceOp:
        """Make a sum in which this rank's tensor is first multiplied by `factor`."""
        return ReduceOp("PREMUL_SUM", _PREMUL, factor)

    def checked_factor(self, name: str | None = None) -> float | torch.Tensor:
        """Return the factor of a premultiplied sum; raise if it has none."""
        if not isinstance(self.factor, (int, float, torch.Tensor)):
            raise UsageError(
                "PREMUL_SUM has no factor", op=name, fix="Use dure.ReduceOp.premul_sum(factor)."
            )
        return self.factor

    @property
    def number(self) -> float:
        """The factor of a premultiplied sum if it is a number; else 1."""
        return float(self.factor) if isinstance(self.factor, (int, float)) else 1.0

    def __repr__(self) -> str:
        return f"ReduceOp.{self.name}"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ReduceOp) and other.code == self.code and other.factor is self.factor
        )

    def __hash__(self) -> int:
        return hash(self.code)

    def __reduce__(self) -> tuple[object, ...]:
        return ReduceOp, (self.name, self.code, self.factor)


_PREMUL = 9  # 8 means no reduction
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
"""Names of the plain reductions; the place of each is its code in the engine."""
for _code, _name in enumerate(REDUCTIONS):
    setattr(ReduceOp, _name, ReduceOp(_name, _code))
ReduceOp.PREMUL_SUM = ReduceOp("PREMUL_SUM", _PREMUL)


def as_reduce_op(op: object) -> ReduceOp:
    """Return the `ReduceOp` for one of Dure's, one of torch's, or a name."""
    if isinstance(op, ReduceOp):
        return op
    name = str(getattr(op, "name", op)).rpartition(".")[2].upper()
    if name in REDUCTIONS:
        return getattr(ReduceOp, name)
    raise UsageError(
        "no such reduction",
        seen=f"{op!r}",
        fix="Use one of " + ", ".join(REDUCTIONS) + " of dure.ReduceOp.",
    )


_FLOAT8 = {getattr(torch, n) for n in dir(torch) if n.startswith("float8_")}
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16} | _FLOAT8
_SIGNED = {torch.int8, torch.int16, torch.int32, torch.int64}
_UNSIGNED = {torch.uint8, torch.uint16, torch.uint32, torch.uint64}
_INTEGERS = _SIGNED | _UNSIGNED
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}
_BOOL = {torch.bool}

# float8_e8m0fnu is a power of two and nothing else: no zero, no sign. A sum of such is rounded to
# the nearest power of two, as torch's own conversion does.
_ALLOWED: dict[str, frozenset[torch.dtype]] = {
    "SUM": frozenset(_FLOATS | _INTEGERS | _COMPLEX | _BOOL),
    "AVG": frozenset(_FLOATS | _INTEGERS | _COMPLEX),
    "PRODUCT": frozenset(_FLOATS | _INTEGERS | _BOOL),
    "MIN": frozenset(_FLOATS | _INTEGERS | _BOOL),
    "MAX": frozenset(_FLOATS | _INTEGERS | _BOOL),
    "BAND": frozenset(_INTEGERS | _BOOL),
    "BOR": frozenset(_INTEGERS | _BOOL),
    "BXOR": frozenset(_INTEGERS | _BOOL),
    "PREMUL_SUM": frozenset(_FLOATS | _COMPLEX),
}


CONVERSIONS = frozenset(
    {
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
    }
)
"""The conversions of reduce_scatter with SUM, AVG and premultiplied sums: (input, output)."""


def reducible_dtypes(op: ReduceOp) -> frozenset[torch.dtype]:
    """Return the dtypes for which `op` is defined."""
    return _ALLOWED[op.name]


def check_reducible(dtype: torch.dtype, op: ReduceOp, name: str) -> None:
    """Raise `DtypeError`, with the allowed dtypes, unless `op` is defined for `dtype`."""
    if dtype in _ALLOWED[op.name]:
        return
    allowed = ", ".join(sorted(str(d).removeprefix("torch.") for d in _ALLOWED[op.name]))
    raise DtypeError(
        f"{name} does not support {op.name} on {dtype}",
        op=name,
        fix=f"It is defined for: {allowed}.",
    )
