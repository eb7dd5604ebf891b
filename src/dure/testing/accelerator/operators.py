"""Operators on the simulated device: each queues the CPU's kernel in the current stream.

One function serves all operators that have no kernel for every device (`run`, the dispatcher's
fallback). The shapes of the results come from torch's kernels without values (device "meta"), so
nothing is computed before the work runs. Operators whose results' shapes depend on values, or whose
result the host reads, block the host, as on a GPU.

Random operators get a seed when they are queued, so values do not depend on the order in which
work runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dure import torch_private
from dure.testing.accelerator.memory import (
    NAME,
    backing_of,
    empty,
    fill_garbage,
    is_on_device,
    on_host,
)
from dure.testing.accelerator.streams import current_stream, stream_of

__all__ = ["GENERATOR", "register"]

_aten: Any = torch.ops.aten
_cpu: Any = torch_private.DispatchKeySet(torch_private.DispatchKey.CPU)
_KEY = "PrivateUse1"
_TAKES_INDICES = ("index", "_index_put_impl_", "index_put_", "index_put", "_unsafe_index")
GENERATOR = torch.Generator()
"""The device's random numbers: seeds of its operators."""
_libraries: list[torch.library.Library] = []


def register() -> None:
    """Give the device its operators."""
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(run, _KEY)
    aten = torch.library.Library("aten", "IMPL")
    for lazy in ("Conjugate", "Negative"):  # `on_host` has seen to them
        aten.impl("_copy_from", torch.library.fallthrough_kernel, lazy)
    _libraries.extend((fallback, aten))


def run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator: a view at once, anything else in the current stream."""
    special = _SPECIAL.get(func)
    if special is not None:
        return special(*args, **kwargs)
    if func.is_view:
        return func.redispatch(_cpu, *args, **kwargs)
    _check_devices(func, args, kwargs)
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    call = _taking_numbers(func, args)
    compute = _seeded(call) if torch.Tag.nondeterministic_seeded in func.tags else call
    try:
        shapes = call(*_to_meta(args), **_to_meta(kwargs))
    except Exception:  # they depend on values, or torch cannot say; errors come again
        return _run_now(func, compute, args, kwargs)
    results = _results(func, shapes, args, kwargs)
    hosts, host_kwargs = _to_host(args), _to_host(kwargs)
    written = [number for number, made in enumerate(results) if made.is_new]
    targets = [on_host(results[number].tensor) for number in written]

    def work() -> None:
        values = _listed(compute(*hosts, **host_kwargs))
        for number, target in zip(written, targets, strict=True):
            if values[number] is not None:  # the CPU's kernel has no such result
                target.copy_(values[number])

    current_stream().add(work)
    return _like(shapes, results)


def _taking_numbers(func: Any, args: Sequence[Any]) -> Any:
    """Return `func`, or its form for numbers where the dispatcher made one of a tensor."""
    if torch_private.should_allow_numbers_as_tensors(func.overloadpacket.__name__):
        return func
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if isinstance(argument.type, torch.TensorType) and isinstance(value, int | float | complex):
            return func.overloadpacket
    return func


class _Result:
    """A tensor that an operator returns: a new one, or one that it was given."""

    def __init__(self, tensor: Any, is_new: bool) -> None:
        self.tensor, self.is_new = tensor, is_new


def _results(func: Any, shapes: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[_Result]:
    """Allocate the results; those that alias an argument are the argument."""
    schema = func._schema
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    written = {
        name: given[a.name]
        for a in schema.arguments
        if a.alias_info is not None and a.alias_info.is_write and given.get(a.name) is not None
        for name in a.alias_info.before_set
    }
    found: list[_Result] = []
    returns = schema.returns
    for number, made in enumerate(_listed(shapes)):
        info = returns[min(number, len(returns) - 1)].alias_info if returns else None
        name = next(iter(info.before_set), None) if info is not None else None
        if name in written:
            _grow(written[name], made)
            found.append(_Result(written[name], False))
        elif isinstance(made, torch.Tensor):
            found.append(_Result(empty(made.size(), made.stride(), made.dtype), True))
        else:
            found.append(_Result(made, False))
    return found


def _grow(tensor: Any, made: Any) -> None:
    """Give an ``out=`` argument the shape that its operator gives it."""
    if isinstance(tensor, torch.Tensor) and tensor.shape != made.shape:
        _resize(tensor, made.shape)


def _listed(values: Any) -> list[Any]:
    return [*values] if isinstance(values, list | tuple) else [values]


def _like(shapes: Any, results: list[_Result]) -> Any:
    tensors = [result.tensor for result in results]
    if isinstance(shapes, list | tuple):
        return type(shapes)(tensors)
    return tensors[0] if shapes is not None else None


def _run_now(func: Any, compute: Any, args: Any, kwargs: Any) -> Any:
    """Block the host until the inputs are ready, and compute."""
    current_stream().synchronize()
    values = compute(*_to_host(args), **_to_host(kwargs))
    results = _results(func, values, args, kwargs)
    for value, result in zip(_listed(values), results, strict=True):
        if result.is_new:
            on_host(result.tensor).copy_(value)
    return _like(values, results)


def _check_devices(func: Any, args: Any, kwargs: Any) -> None:
    """Raise if a tensor of the CPU is among the operands; numbers and indices may be."""
    if func.__name__.partition(".")[0] in _TAKES_INDICES:
        return

    def check(tensor: torch.Tensor) -> None:
        if not is_on_device(tensor) and tensor.ndim:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {func} got one on "
                f"{tensor.device} beside tensors on {NAME}:0"
            )

    _mapped((args, kwargs), check)


def _mapped(value: Any, change: Callable[[torch.Tensor], object]) -> Any:
    """Return operands with each tensor changed; they are tensors, lists of these, and others."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return [_mapped(each, change) for each in value]
    if isinstance(value, dict):
        return {name: _mapped(each, change) for name, each in value.items()}
    return value


def _to_host(value: Any) -> Any:
    """Return operands as tensors on the CPU; of those that are on it, their present values."""
    return _mapped(value, lambda t: on_host(t) if is_on_device(t) else t.clone())


def _to_meta(value: Any) -> Any:
    def shape(tensor: torch.Tensor) -> torch.Tensor:
        if not is_on_device(tensor):
            return tensor.to("meta")
        return torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
        )

    moved = _mapped(value, shape)
    if isinstance(moved, dict) and moved.get("device") is not None:
        moved["device"] = torch.device("meta")
    return moved


def _seeded(func: Any) -> Callable[..., Any]:
    """Return `func` with random numbers of a seed that is drawn now."""
    seed = int(torch.randint(1 << 62, (), generator=GENERATOR, device="cpu"))

    def compute(*args: Any, **kwargs: Any) -> Any:
        host = torch.default_generator
        before = host.get_state()
        host.manual_seed(seed)
        try:
            return func(*args, **kwargs)
        finally:
            host.set_state(before)

    return compute


# ---------------------------------------------------------------- operators of their own


def _empty(
    size: Any,
    dtype: Any = None,
    memory_format: Any = None,
    **options: object,
) -> torch.Tensor:
    shape = torch.empty(
        size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format
    )
    return empty(shape.size(), shape.stride(), shape.dtype)


def _empty_strided(size: Any, stride: Any, dtype: Any = None, **options: object) -> torch.Tensor:
    return empty(size, stride, dtype or torch.get_default_dtype())


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy within the device, to the host or from it; the host waits unless `non_blocking`."""
    stream, reads = current_stream(), is_on_device(source)
    origin = on_host(source) if reads else source
    if is_on_device(target):
        there = on_host(target)
        stream.add(lambda: there.copy_(origin))
        if not reads and not non_blocking:
            stream.synchronize()
    elif non_blocking:
        fill_garbage(target)
        stream.add(lambda: target.copy_(origin))
    else:
        stream.synchronize()
        target.copy_(origin)
    return target


def _read(func: Any) -> Callable[..., Any]:
    def read(*args: Any, **kwargs: Any) -> Any:
        current_stream().synchronize()
        return func(*_to_host(args), **_to_host(kwargs))

    return read


def _resize(tensor: Any, size: Any, memory_format: Any = None) -> torch.Tensor:
    like: Any = torch.empty(size, dtype=tensor.dtype, device="meta")
    needed = (tensor.storage_offset() + like.numel()) * tensor.itemsize
    storage: Any = tensor.untyped_storage()
    if needed > storage.nbytes():
        # The number of bytes that C++ knows cannot grow.
        old, storage = storage.backing, empty([needed], [1], torch.uint8).untyped_storage()
        there, here = storage.backing.host_bytes[: old.nbytes()], old.host_bytes
        current_stream().add(lambda: there.copy_(here))
    return _set_to(tensor, storage, tensor.storage_offset(), like.size(), like.stride())


def _set_to(tensor: torch.Tensor, *where: Any) -> torch.Tensor:
    return _aten.set_.source_Storage_storage_offset.redispatch(_cpu, tensor, *where)


def _set_storage(tensor: torch.Tensor, storage: Any) -> torch.Tensor:
    return _set_to(tensor, storage, 0, [storage.nbytes() // tensor.itemsize], [1])


def _set_tensor(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    where = source.untyped_storage(), source.storage_offset(), source.size(), source.stride()
    return _set_to(tensor, *where)


def _record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    backing_of(tensor).block.used_in.add(stream_of(stream.stream_id))


_SPECIAL: dict[Any, Callable[..., Any]] = {
    _aten.empty.memory_format: _empty,
    _aten.empty_strided.default: _empty_strided,
    _aten._copy_from.default: _copy,
    _aten.copy_.default: lambda target, source, non_blocking=False: _copy(
        source, target, non_blocking
    ),
    _aten.resize_.default: _resize,
    _aten.set_.source_Storage_storage_offset: _set_to,
    _aten.set_.source_Storage: _set_storage,
    _aten.set_.source_Tensor: _set_tensor,
    _aten.record_stream.default: _record_stream,
    _aten._fused_sdp_choice.default: lambda *args, **kwargs: 0,  # the kernel made of operators
    **{
        func: _read(func)
        for func in (
            _aten._local_scalar_dense.default,
            _aten.equal.default,
            _aten.is_nonzero.default,
        )
    },
}
