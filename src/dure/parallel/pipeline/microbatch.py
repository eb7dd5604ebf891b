"""How a batch is cut into microbatches, and results are put together.

Arguments and results are pytrees. A *chunk spec* is a pytree like them, with a `TensorChunkSpec`
for each tensor that is cut; values with another spec are the same in each microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch

from dure.errors import ShapeError, UsageError
from dure.tensor.dtensor import DTensor
from dure.tensor.placement_types import Replicate
from dure.torch_private import pytree

__all__ = ["TensorChunkSpec", "merge_chunks", "split_args_kwargs_into_chunks", "split_tensor"]


class TensorChunkSpec:
    """A tensor is cut along `split_dim`; chunks are as equal as possible, the first the largest.

    Example:
        ```python
        from dure.pipelining import microbatch

        specs = microbatch.TensorChunkSpec.from_tuple((1,))  # the first argument, along dimension 1
        args, _ = microbatch.split_args_kwargs_into_chunks((torch.ones(3, 4),), {}, 2, specs)
        assert [chunk[0].shape for chunk in args] == [(3, 2), (3, 2)]
        ```
    """

    def __init__(self, split_dim: int) -> None:
        self.split_dim = split_dim

    def __repr__(self) -> str:
        return f"TensorChunkSpec({self.split_dim})"

    @staticmethod
    def from_tuple(chunk_dims: tuple[int, ...]) -> tuple[TensorChunkSpec, ...]:
        """Return the specs of positional arguments.

        Args:
            chunk_dims: For each argument, the dimension along which it is cut.
        """
        return pytree.tree_map(TensorChunkSpec, chunk_dims)

    @staticmethod
    def from_dict(chunk_dims: dict[str, int]) -> dict[str, TensorChunkSpec]:
        """Return the specs of keyword arguments.

        Args:
            chunk_dims: For each argument, the dimension along which it is cut.
        """
        return pytree.tree_map(TensorChunkSpec, chunk_dims)


def _default_spec(value: object) -> TensorChunkSpec | None:
    """Return the spec of a leaf; None for what is the same in each microbatch."""
    if type(value).__name__ == "BlockMask" and len(getattr(value, "kv_num_blocks", ())) > 1:
        raise UsageError(
            "a BlockMask over the batch is not cut into microbatches",
            seen="one with a row for each sequence",
            fix="Make the mask inside the stage, or one that is the same for all sequences.",
        )
    return TensorChunkSpec(0) if isinstance(value, torch.Tensor) else None


def split_tensor(
    tensor: torch.Tensor, spec: TensorChunkSpec, chunks: int
) -> Sequence[torch.Tensor]:
    """Return `tensor` as `chunks` tensors; those of a DTensor have its placements.

    If the chunks divide the rows of each rank, each rank cuts its own: chunk i has rows of all
    ranks. Else the rows of a chunk are those that one process would have. `merge_chunks` puts
    results of either kind into the order of the batch.

    Raises:
        ShapeError: It has fewer than `chunks` along the dimension.

    Collective:
        All ranks of the DTensor's mesh, if it is sharded along the dimension and the chunks do not
        divide the rows of each rank.
    """
    size = tensor.size(spec.split_dim)
    if size < chunks:
        raise ShapeError(
            "the batch is smaller than the number of microbatches",
            seen=f"{size} along dimension {spec.split_dim} of {tuple(tensor.shape)}, "
            f"and {chunks} microbatches",
            fix=f"Take at most {size} microbatches, or a larger batch.",
        )
    if not isinstance(tensor, DTensor):
        parts = torch.tensor_split(tensor, chunks, spec.split_dim)
        if tensor.requires_grad and tensor.is_leaf:
            for part in parts:
                part.retain_grad()
        return parts
    shards = _num_shards(tensor, spec.split_dim)
    if shards != 1 and size % (shards * chunks) != 0:
        parts = torch.tensor_split(_whole_along(tensor, spec.split_dim), chunks, spec.split_dim)
        return [cast(DTensor, p).redistribute(placements=tensor.placements) for p in parts]
    quotient, remainder = divmod(size, chunks)
    local: torch.Tensor = tensor.to_local()
    return [
        _distributed(part, tensor, spec.split_dim, quotient + (i < remainder))
        for i, part in enumerate(torch.tensor_split(local, chunks, spec.split_dim))
    ]


def _num_shards(tensor: DTensor, dim: int) -> int:
    """Return among how many ranks a dimension is divided."""
    mesh, dim = tensor.device_mesh, dim % tensor.dim()
    return math.prod(mesh.size(i) for i, p in enumerate(tensor.placements) if p.is_shard(dim))


def _whole_along(tensor: DTensor, dim: int) -> DTensor:
    """Return `tensor` with a dimension that is not divided."""
    dim %= tensor.dim()
    return tensor.redistribute(
        placements=[Replicate() if p.is_shard(dim) else p for p in tensor.placements]
    )


def _distributed(local: torch.Tensor, like: DTensor, dim: int, size: int) -> DTensor:
    """Return a DTensor of such parts, with `size` elements along `dim`."""
    shape = list(like.shape)
    shape[dim] = size
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=like.stride(),
    )


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    chunks: int,
    args_chunk_spec: tuple[Any, ...] | None = None,
    kwargs_chunk_spec: dict[str, Any] | None = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Cut positional and keyword arguments into microbatches.

    Args:
        args: Pytrees; tensors in them are cut, other values are the same in each microbatch.
        kwargs: Likewise.
        chunks: How many microbatches.
        args_chunk_spec: A pytree like `args`; None: every tensor along dimension 0.
        kwargs_chunk_spec: Likewise.

    Returns:
        Positional, and keyword arguments of each microbatch.

    Raises:
        ShapeError: A tensor has fewer than `chunks` along its dimension.
        UsageError: The specs do not fit the arguments.

    Example:
        ```python
        from dure.pipelining import microbatch

        x = torch.arange(4.0)
        args, kwargs = microbatch.split_args_kwargs_into_chunks((x,), {"scale": 2}, 2)
        assert [chunk[0].tolist() for chunk in args] == [[0.0, 1.0], [2.0, 3.0]]
        assert kwargs == [{"scale": 2}, {"scale": 2}]
        ```
    """
    split_args = _split_tree(tuple(args), chunks, args_chunk_spec)
    return split_args, _split_tree(dict(kwargs or {}), chunks, kwargs_chunk_spec)


def _split_tree(value: Any, chunks: int, spec: Any) -> list[Any]:
    """Cut a pytree."""
    leaves, tree = pytree.tree_flatten(value)
    specs: list[Any] = []
    if spec is None:
        specs = [_default_spec(leaf) for leaf in leaves]
    else:
        specs = pytree.tree_flatten(type(value)(spec) if value else value)[0]
    if len(specs) != len(leaves):
        raise UsageError(
            "the chunk specs do not fit the arguments",
            seen=f"{len(specs)} specs and {len(leaves)} arguments",
            fix="Give a TensorChunkSpec for each tensor, in the structure of the arguments.",
        )
    columns: list[Sequence[Any]] = []
    for leaf, one in zip(leaves, specs, strict=True):
        is_cut = isinstance(one, TensorChunkSpec) and isinstance(leaf, torch.Tensor) and leaf.dim()
        columns.append(split_tensor(leaf, one, chunks) if is_cut else [leaf] * chunks)
    return [pytree.tree_unflatten([column[i] for column in columns], tree) for i in range(chunks)]


def merge_chunks(chunks: list[Any], chunk_spec: Any) -> Any:
    """Put the results of microbatches together: the inverse of cutting.

    Args:
        chunks: One pytree a microbatch.
        chunk_spec: A pytree like each of them; None: tensors are joined along dimension 0 (those
            without dimensions are stacked), anything else must be the same in all.

    Returns:
        One pytree, like each of the chunks.

    Raises:
        UsageError: The chunks differ in structure, or in what is not joined.

    Example:
        ```python
        assert torch.equal(microbatch.merge_chunks([args[0][0], args[1][0]], None), x)
        ```
    """
    rows = [pytree.tree_flatten(chunk) for chunk in chunks]
    first, tree = rows[0]
    if chunk_spec is None:
        specs: list[Any] = [_default_spec(leaf) for leaf in first]
    else:
        specs, tree = pytree.tree_flatten(chunk_spec)
    if any(len(leaves) != len(specs) for leaves, _ in rows):
        raise UsageError(
            "the results of microbatches do not fit the merge spec",
            seen=f"{[len(leaves) for leaves, _ in rows]} values, {len(specs)} specs",
        )
    columns = zip(*(leaves for leaves, _ in rows), strict=True)
    return pytree.tree_unflatten(
        [_merge(list(c), s) for c, s in zip(columns, specs, strict=True)], tree
    )


def _merge(values: list[Any], spec: Any) -> Any:
    first = values[0]
    if isinstance(spec, TensorChunkSpec) and isinstance(first, torch.Tensor):
        if first.dim() == 0:
            return torch.stack(values)
        if not isinstance(first, DTensor):
            return torch.cat(values, dim=spec.split_dim)
        return _joined(values, spec.split_dim)
    if not all(bool(value == first) for value in values[1:]):
        raise UsageError("values that are not joined differ between microbatches", seen=f"{values}")
    return first


def _joined(parts: list[DTensor], dim: int) -> DTensor:
    """Put DTensors together; see `split_tensor`."""
    sizes, first = [part.size(dim) for part in parts], parts[0]
    shards = _num_shards(first, dim)
    if shards != 1 and (len(set(sizes)) > 1 or sizes[0] % shards != 0):
        joined = torch.cat([_whole_along(part, dim) for part in parts], dim)
        return cast(DTensor, joined).redistribute(placements=first.placements)
    local = torch.cat([part.to_local() for part in parts], dim)
    return _distributed(local, first, dim, sum(sizes))
