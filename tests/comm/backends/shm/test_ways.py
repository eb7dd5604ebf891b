"""Which way a call is said to take through shared memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from dure.comm.backends.shm.copying import CopyPlan
from dure.comm.backends.shm.ways import INLINE_BYTES, SMALL_BYTES, way
from dure.comm.call import Call
from dure.comm.memory import heap_empty
from dure.comm.ops import ReduceOp, as_reduce_op

CORE = Path(__file__).parents[4] / "csrc/core"
KIB = 1024
COPIES = CopyPlan(True, True, 0.1, 64 * KIB, 32 * KIB, 96 * KIB)
STAGED = CopyPlan(False, False, 0.0, None, None, None)
ONCE = "copied once by the kernel, or through staging if the ranks' caches cannot hold the data"
SUM = as_reduce_op(ReduceOp.SUM)


def _call(op: str, nbytes: int, heap: bool = False) -> Call:
    made = heap_empty if heap else torch.empty
    tensor = (made(nbytes, dtype=torch.uint8),)
    peer = 1 if op in {"send", "recv"} else None
    return Call(op=op, inputs=tensor, outputs=tensor, reduction=SUM, peer=peer)


@pytest.mark.parametrize(
    ("op", "nbytes", "size", "copies", "text"),
    [
        ("all_reduce", 0, 2, COPIES, "one barrier"),
        ("all_reduce", 8, 1, COPIES, "nothing to exchange"),
        ("all_reduce", 33, 2, COPIES, "one-shot"),
        ("all_reduce", 16 * KIB + 1, 2, COPIES, "pairwise exchange"),
        ("reduce", 1 << 20, 3, COPIES, "two-shot"),
        ("broadcast", 64 * KIB - 1, 2, COPIES, "through staging"),  # two ranks copy together
        ("broadcast", 64 * KIB, 2, COPIES, ONCE),
        ("broadcast", 32 * KIB, 3, COPIES, ONCE),
        ("broadcast", 32 * KIB, 3, STAGED, "through staging"),
        ("scatter", 96 * KIB, 2, COPIES, ONCE),
        ("all_to_all_single", 192 * KIB - 2, 2, COPIES, "through staging"),
        ("all_to_all_single", 192 * KIB, 2, COPIES, ONCE),
        ("reduce_scatter_single", 1 << 20, 2, COPIES, "through staging"),
        ("send", 64 * KIB - 1, 2, COPIES, "through the ring"),
        ("send", 64 * KIB, 2, COPIES, "copied once by the kernel"),
    ],
)
def test_way_of_ordinary_tensors(
    op: str, nbytes: int, size: int, copies: CopyPlan, text: str
) -> None:
    assert way(_call(op, nbytes), size, copies) == text


@pytest.mark.needs("engine")
@pytest.mark.parametrize(
    ("op", "text"),
    [
        ("all_reduce", "direct, if "),
        ("reduce", "pairwise exchange"),
        ("scatter", "through staging"),
        ("reduce_scatter_single", "zero-copy, if "),
        ("all_gather_single", "zero-copy, if "),
        ("send", "from the symmetric heap"),
    ],
)
def test_way_of_tensors_in_the_symmetric_heap(op: str, text: str) -> None:
    assert way(_call(op, 64 * KIB, heap=True), 2, COPIES).startswith(text)


def test_sizes_are_those_of_the_engine() -> None:
    def number(file: str, name: str) -> int:
        found = re.search(rf"{name} = ([\d* ]+);", (CORE / file).read_text())
        assert found is not None
        factors = [int(factor) for factor in found[1].split("*")]
        return factors[0] * (factors[1] if len(factors) > 1 else 1)

    assert number("layout.h", "kInlineBytes") == INLINE_BYTES
    assert number("layout.h", "kZeroCopyBytes") == SMALL_BYTES
    assert number("all_reduce.cpp", "kOneShotBytes") == SMALL_BYTES
