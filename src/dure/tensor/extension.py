"""Replace functions of DTensor's dispatch by the faster ones of csrc/dispatch/hits.cpp.

The functions in Python are the definition, and run if the extension was not built; see wrapping.py.
"""

from __future__ import annotations

import torch

from dure.tensor import dispatch
from dure.tensor.dtensor import DTensor
from dure.tensor.planning import OperatorPlan
from dure.tensor.registry import OtherStrides, by_value
from dure.tensor.spec import DTensorSpec, TensorMeta
from dure.tensor.wrapping import is_in_inference, make_wrapper, native, wrap_in_python

__all__ = ["use_native"]

_dispatch_in_python = DTensor.__dict__["__torch_dispatch__"]
_grad_in_python: property = DTensor.__dict__["grad"]


def use_native(on: bool) -> None:
    """Run hits in the extension if it was built, or in Python, so that tests can compare both."""
    on = on and native is not None
    DTensor.__torch_dispatch__ = (  # pyright: ignore[reportAttributeAccessIssue]
        classmethod(native.dispatch) if on and native is not None else _dispatch_in_python
    )
    DTensor.grad = (  # pyright: ignore
        property(
            native.read_grad, _grad_in_python.fset, _grad_in_python.fdel, _grad_in_python.__doc__
        )
        if on and native is not None
        else _grad_in_python
    )


if native is not None:
    native.bind(
        dtensor=DTensor,
        tensor=torch.Tensor,
        spec=DTensorSpec,
        meta=TensorMeta,
        plan=OperatorPlan,
        plans=dispatch.plans,
        by_value=by_value,
        make=make_wrapper,
        in_inference=is_in_inference,
        strided=torch.strided,
        grad=torch.Tensor.grad,  # pyright: ignore
        slow_dispatch=dispatch.dispatch,
        slow_wrap=wrap_in_python,
        slow_grad=_grad_in_python.fget,
    )
    native.copy_after(OtherStrides)
    use_native(True)
