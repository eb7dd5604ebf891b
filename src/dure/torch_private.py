"""The private names of torch that Dure uses: all of them, and a check that this torch has them.

Torch may rename or remove a name with an underscore in any release. So the rest of the package gets
such names from here, under the same name without the underscore, and a new torch needs changes in
this file only. `tests/arch/test_torch_private.py` finds uses elsewhere. Three kinds of file cannot
use this module, and are listed there: modules at torch's paths, whose private names are their
content; the launcher, which must not import torch; and the beginning of the plug-in with the
stand-in for Gloo, which `import torch` loads and which check for the names themselves.

Two times of checking:

* `_find` looks a name up when this module is imported, that is when Dure first uses torch. At the
  end `TorchVersionError` lists all names that were not found.
* `later` looks up what is in modules that `import torch` does not load, and what only some torches
  in the supported range have.

Internal: names here may change in any release.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from dure.errors import TorchVersionError
from dure.version import NEWEST_TORCH as NEWEST
from dure.version import OLDEST_TORCH as OLDEST

NAMES: list[str] = []
"""The path of every name that `_find` has looked up."""

LATER = {
    "torch._C._acc.create_empty_tensor": "2.13",
    "torch._C._autograd._get_sequence_nr": OLDEST,
    "torch._dynamo.exc.Unsupported": OLDEST,
    "torch.distributed.distributed_c10d._FR_SELF_RECORDING_BACKENDS": "2.15",
    "torch.distributed.distributed_c10d._new_process_group_helper": OLDEST,
    "torch.distributed.distributed_c10d._world.pg_backend_config": OLDEST,
    "torch.distributed.distributed_c10d._world.pg_map": OLDEST,
    "torch.numa.binding._maybe_apply_numa_binding_to_current_process": OLDEST,
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend": "2.13",
}
"""Paths that are not looked up at import, with the first minor version of torch that has each."""

_ABSENT: Any = object()
_missing: list[str] = []


def _look_up(path: str) -> Any:
    """Return the object at a path, or `_ABSENT`; modules on the way are imported."""
    found: Any = torch
    parts = path.split(".")
    for number, part in enumerate(parts[1:], 2):
        above, found = found, getattr(found, part, _ABSENT)
        if found is _ABSENT and isinstance(above, ModuleType):
            try:
                found = importlib.import_module(".".join(parts[:number]))
            except ImportError:
                return _ABSENT
        if found is _ABSENT:
            return _ABSENT
    return found


def _find(path: str, *members: str) -> Any:
    """Return the object at `path`; list it, or a member that it lacks, if it is missing."""
    NAMES.extend([path, *(f"{path}.{member}" for member in members)])
    found = _look_up(path)
    if found is _ABSENT:
        _missing.append(path)
        return None
    _missing.extend(f"{path}.{m}" for m in members if not hasattr(found, m))
    return found


def later(path: str) -> Any:
    """Return what is at a path of `LATER`.

    Raises:
        TorchVersionError: This torch does not have it.
    """
    since = LATER[path]
    found = _look_up(path)
    if found is _ABSENT:
        raise not_supported([path], since)
    return found


def not_supported(missing: Sequence[str], since: str = OLDEST) -> TorchVersionError:
    """Return the error that names what torch lacks, its version, and the versions that work."""
    return TorchVersionError(
        f"torch {torch.__version__} lacks what Dure needs of it",
        seen=f"no {', no '.join(missing)}",
        fix=f"Install a torch from {since} to {NEWEST} (docs/install.md lists what was tested).",
    )


has_distributed = hasattr(torch._C, "_distributed_c10d")  # pyright: ignore[reportPrivateUsage]
"""Whether torch was built with torch.distributed."""
has_nccl = hasattr(torch._C, "_nccl_version")  # pyright: ignore[reportPrivateUsage]
"""Whether torch was built with NCCL."""

if TYPE_CHECKING:  # for names that annotations use
    from torch import _ops
    from torch._C import _distributed_c10d as c10d  # pyright: ignore[reportPrivateUsage]
    from torch.fx import graph as _graph
    from torch.nn.modules import batchnorm as _batchnorm
    from torch.utils import _python_dispatch, _pytree

    ProcessGroupNCCL = c10d.ProcessGroupNCCL
    OpOverload = _ops.OpOverload
    TorchDispatchMode = _python_dispatch.TorchDispatchMode
    PyTreeCodeGen = _graph._PyTreeCodeGen  # pyright: ignore[reportPrivateUsage]
    PyTreeInfo = _graph._PyTreeInfo  # pyright: ignore[reportPrivateUsage]
    BatchNorm = _batchnorm._BatchNorm  # pyright: ignore[reportPrivateUsage]
    pytree = _pytree
else:
    if has_distributed:
        c10d = _find(
            "torch._C._distributed_c10d",
            *("AllreduceOptions", "BroadcastOptions", "ReduceOptions", "ReduceScatterOptions"),
            *("PrefixStore", "ProcessGroup", "ReduceOp", "Store", "Work"),
        )
        ProcessGroupNCCL = getattr(c10d, "ProcessGroupNCCL", None)  # None: torch has no NCCL
    OpOverload = _find("torch._ops.OpOverload")
    PyTreeCodeGen = _find("torch.fx.graph._PyTreeCodeGen")
    PyTreeInfo = _find("torch.fx.graph._PyTreeInfo")
    BatchNorm = _find("torch.nn.modules.batchnorm._BatchNorm")
    pytree = _find(
        "torch.utils._pytree",
        *("TreeSpec", "keystr", "tree_flatten", "tree_flatten_with_path", "tree_leaves"),
        *("tree_map", "tree_map_only", "tree_unflatten"),
    )
    TorchDispatchMode = _find("torch.utils._python_dispatch.TorchDispatchMode")

# The engine reads three functions of the bindings (csrc/bindings/tensor.cpp).
bindings = _find("torch._C", "_is_tracing", "_len_torch_dispatch_stack", "_increment_version")
increment_version: Callable[[Sequence[torch.Tensor]], None] = _find("torch._C._increment_version")
is_alias_of: Callable[[torch.Tensor, torch.Tensor], bool] = _find("torch._C._is_alias_of")

# Modes, tracing and transforms
DisableTorchFunction = _find("torch._C.DisableTorchFunction")
DisableTorchFunctionSubclass = _find("torch._C.DisableTorchFunctionSubclass")
disabled_torch_function_impl = _find("torch._C._disabled_torch_function_impl")
disable_current_modes = _find("torch.utils._python_dispatch._disable_current_modes")
dispatch_modes = _find("torch.utils._python_dispatch", "_is_in_torch_dispatch_mode")
forward_ad = _find("torch.autograd.forward_ad", "_current_level")
functorch = _find(
    "torch._C._functorch",
    *("TransformType", "is_functorch_wrapped_tensor", "maybe_current_level"),
    "peek_interpreter_stack",
)
get_dispatch_mode = _find("torch._C._get_dispatch_mode")
is_tracing: Callable[[], bool] = _find("torch._C._is_tracing")
len_torch_dispatch_stack: Callable[[], int] = _find("torch._C._len_torch_dispatch_stack")
TorchDispatchModeKey = _find("torch._C._TorchDispatchModeKey", "FAKE", "FUNCTIONAL", "PROXY")
TracingContext = _find("torch._guards.TracingContext", "try_get")
eval_frame = _find(
    "torch._C._dynamo.eval_frame", "_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy"
)

# The dispatcher and its operators
DispatchKey = _find(
    "torch._C.DispatchKey", "CPU", "CompositeExplicitAutograd", "Python", "PythonTLSSnapshot"
)
DispatchKeySet = _find("torch._C.DispatchKeySet")
ExcludeDispatchKeyGuard = _find("torch._C._ExcludeDispatchKeyGuard")
decomposition_table = _find("torch._decomp.decomposition_table")
dispatch_get_all_op_names = _find("torch._C._dispatch_get_all_op_names")
dispatch_has_kernel = _find("torch._C._dispatch_has_kernel_for_dispatch_key")
flash_attention = _find("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu")
flash_attention_backward = _find(
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward"
)
foreach_copy_ = _find("torch._foreach_copy_")
foreach_mul_ = _find("torch._foreach_mul_")
foreach_norm = _find("torch._foreach_norm")
foreach_types_in_optimizers = _find("torch.optim.optimizer._foreach_supported_types")
foreach_types_in_lists = _find("torch.utils._foreach_utils._foreach_supported_types")
make_wrapper_subclass = _find("torch.Tensor._make_wrapper_subclass")
neg_view = _find("torch._neg_view")
should_allow_numbers_as_tensors = _find("torch._C._should_allow_numbers_as_tensors")
suggest_memory_format = _find("torch._prims_common.suggest_memory_format")

# Autograd
DelayedError = _find("torch._C._functions.DelayedError")
current_autograd_node = _find("torch._C._current_autograd_node")
current_graph_task_id: Callable[[], int] = _find("torch._C._current_graph_task_id")
execution_engine = _find(
    "torch.autograd.Variable._execution_engine", "queue_callback", "run_backward"
)
keeps_graph: Callable[[], bool] = _find("torch._C._autograd._get_current_graph_task_keep_graph")
unsafe_preserve_version_counter = _find("torch.autograd._unsafe_preserve_version_counter")
will_engine_execute_node: Callable[[Any], bool] = _find("torch._C._will_engine_execute_node")

# The profiler
RecordFunctionFast = _find("torch._C._profiler._RecordFunctionFast")
call_end_callbacks = _find("torch.ops.profiler._call_end_callbacks_on_jit_fut")
profiler = _find("torch.autograd.profiler", "_is_profiler_enabled")
profiler_enabled: Callable[[], bool] = _find("torch._C._autograd._profiler_enabled")
record_function_enter: Callable[..., torch.Tensor] = _find(
    "torch._C._autograd._record_function_with_args_enter"
)

# Devices
construct_storage = _find("torch._C._construct_storage_from_data_pointer")
get_privateuse1_name: Callable[[], str] = _find("torch._C._get_privateuse1_backend_name")

if _missing:
    raise not_supported(_missing)
