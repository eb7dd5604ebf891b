"""Who has a tensor: the program, or only torch's C++ code.

Torch's own formulas, of composite operators and of gradients, write tensors that no program has
ever seen, and make plain ones. What no program has may be moved between ranks before it is written
(dispatch.py); a program's may not. Where it cannot be told, it is a program's.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from dure.tensor.call import Place

if TYPE_CHECKING:
    from dure.tensor.dtensor import DTensor

__all__ = ["has_its_part_alone", "is_shared", "unseen_among"]


class _Probe(torch.Tensor):
    """Counts the references to what a program adds to it, as `unseen_among` does."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return torch.tensor(sys.getrefcount(args[1]), device="cpu")


def _references_of_none() -> int:
    """Return how many references there are at most to a tensor that only C++ code has.

    Known are three: torch's own, that in `args`, and getrefcount's argument. Whoever calls an
    operator through Python holds each argument for as long as the call runs, by a variable, a
    container or the interpreter's stack: that is one more, at least. Interpreters and releases of
    torch may count otherwise; if the least that a program can hold counts less here, so does this.
    """
    probe = torch.Tensor._make_wrapper_subclass(_Probe, ())  # pyright: ignore
    return min(3, int(torch.add(probe, torch.ones((), device="cpu"))) - 1)


_REFERENCES = _references_of_none()


def unseen_among(args: tuple[Any, ...]) -> frozenset[Place]:
    """Return where tensors stand that no program has: torch's C++ code made them.

    More references than those of a tensor that nobody has may be anything's: a debugger's, a
    mode's. Then the tensor counts as seen, and what would have moved it raises. What a program's
    own C++ code or a TorchScript module holds, and Python does not, counts as torch's.
    """
    count, found = sys.getrefcount, list[Place]()
    for where in range(len(args)):
        if type(args[where]) in (list, tuple):
            inside = range(len(args[where]))
            found += [(where, i) for i in inside if count(args[where][i]) <= _REFERENCES]
        elif count(args[where]) <= _REFERENCES:
            found.append((where, None))
    return frozenset(found)


def has_its_part_alone(tensor: DTensor) -> bool:
    """Tell whether nobody but a DTensor has its part, or memory of it."""
    return sys.getrefcount(tensor.part) <= 2 and not is_shared(tensor.part)  # its own, this one's


def is_shared(part: torch.Tensor) -> bool:
    """Tell whether another tensor shares this one's memory."""
    storage = part.untyped_storage()
    uses: int = torch._C._storage_Use_Count(storage._cdata)  # pyright: ignore
    return uses > 2  # the tensor's and this function's
