"""The extension csrc/dispatch/hits.cpp: a hit of DTensor's dispatch. Optional."""

from collections.abc import Sequence
from typing import Any

import torch

from dure.tensor.dtensor import DTensor
from dure.tensor.spec import DTensorSpec

def bind(**parts: Any) -> None: ...
def copy_after(type: type[Exception]) -> None:
    """Take the exception of a view that the strides of a part do not allow."""

def dispatch(
    cls: type[DTensor], func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any: ...
def wrap(local: torch.Tensor, spec: DTensorSpec, /) -> DTensor: ...
def parts(
    tensors: Sequence[torch.Tensor | None], specs: list[DTensorSpec | None], /
) -> list[Any] | None: ...
def read_grad(of: DTensor, /) -> torch.Tensor | None: ...
