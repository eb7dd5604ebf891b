"""Placements: how a tensor is distributed along one axis of a mesh.

A DTensor has one placement for each mesh axis. They apply from left to right: axis 0 divides the
tensor, axis 1 divides the part of each of its ranks, and so on.

    Shard(dim)       ranks have consecutive parts of dimension `dim`, as torch.chunk cuts
    Replicate()      each rank has the full tensor
    Partial(op)      each rank has a term; the value is their sum (average, min, max, product)

`StridedShard` is a result of operators; users do not write it: a rank has a part of each of several
runs. `MaskPartial` is torch's name for the result of a lookup in a table sharded by rows, which is
`Partial("sum")` here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dure.errors import PlacementError

__all__ = [
    "MaskPartial",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
    "chunk",
    "pad_tensor",
    "unpad_tensor",
]

REDUCTIONS = ("sum", "avg", "min", "max", "product")


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return (size, offset) of a part as torch.chunk cuts; the last parts may be short or empty.

    Args:
        size: The size of the dimension.
        parts: How many parts.
        index: Which part.

    Returns:
        The size of the part, and its first position.

    Example:
        ```python
        from dure.tensor.placement_types import chunk, pad_tensor, unpad_tensor

        assert [chunk(5, 3, i) for i in range(3)] == [(2, 0), (2, 2), (1, 4)]
        ```
    """
    full = -(-size // parts)
    offset = min(full * index, size)
    return min(full, size - offset), offset


def _chunks(tensor: torch.Tensor, parts: int, dim: int) -> list[torch.Tensor]:
    """Return `parts` consecutive views of a tensor; the last ones may be short or empty."""
    cuts = [chunk(tensor.size(dim), parts, index) for index in range(parts)]
    return [tensor.narrow(dim, offset, size) for size, offset in cuts]


def pad_tensor(tensor: torch.Tensor, pad_dim: int, pad_size: int) -> torch.Tensor:
    """Return a tensor with `pad_size` zeros after the end of a dimension.

    Args:
        tensor: Any tensor.
        pad_dim: The dimension.
        pad_size: How many zeros.

    Returns:
        A new tensor.

    Example:
        ```python
        assert pad_tensor(torch.ones(2), 0, 1).tolist() == [1.0, 1.0, 0.0]
        ```
    """
    if pad_size == 0:
        return tensor
    shape = list(tensor.shape)
    shape[pad_dim] = pad_size
    return torch.cat([tensor, tensor.new_zeros(shape)], pad_dim)


def unpad_tensor(tensor: torch.Tensor, pad_dim: int, pad_size: int) -> torch.Tensor:
    """Return a view without the last `pad_size` elements of a dimension.

    Args:
        tensor: Any tensor.
        pad_dim: The dimension.
        pad_size: How many elements to leave out.

    Returns:
        A view.

    Example:
        ```python
        assert unpad_tensor(torch.tensor([1.0, 1.0, 0.0]), 0, 1).tolist() == [1.0, 1.0]
        ```
    """
    return tensor.narrow(pad_dim, 0, tensor.size(pad_dim) - pad_size)


@dataclass(frozen=True)
class Placement:
    """How a tensor is distributed along one axis of a mesh: Shard, Replicate or Partial.

    Obtained from:
        `DTensor.placements`; programs make `Shard`, `Replicate` and `Partial`.
    """

    def is_shard(self, dim: int | None = None) -> bool:
        """Return whether the axis cuts a dimension of the tensor.

        Args:
            dim: The dimension; if None, any dimension.
        """
        return isinstance(self, Shard) and (dim is None or self.dim == dim)

    def is_replicate(self) -> bool:
        """Return whether each rank has the full tensor (or what other axes leave of it)."""
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Return whether each rank has a term of a reduction.

        Args:
            reduce_op: The reduction; if None, any reduction.
        """
        return isinstance(self, Partial) and (reduce_op is None or self.reduce_op == reduce_op)


@dataclass(frozen=True, repr=False)
class Shard(Placement):
    """Ranks have consecutive parts of a dimension, cut as torch.chunk does.

    The last ranks may have shorter parts, or empty ones.

    Args:
        dim: The dimension; a negative one counts from the end.

    Raises:
        PlacementError: `dim` is not an integer.

    Example:
        ```python
        from dure.tensor import Shard, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (2,))
        rows = distribute_tensor(torch.ones(5, 2), mesh, [Shard(0)])
        assert rows.to_local().shape == ((3, 2) if dist.get_rank() == 0 else (2, 2))
        ```
    """

    dim: int

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlacementError("the dim of Shard must be an integer", seen=f"{self.dim!r}")

    @staticmethod
    def local_shard_size_and_offset(
        curr_local_size: int, num_chunks: int, rank: int
    ) -> tuple[int, int]:
        """Return the size and the offset of part `rank` of `num_chunks`; torch's name.

        Args:
            curr_local_size: Size of the dimension.
            num_chunks: Number of parts.
            rank: Number of the part.
        """
        return chunk(curr_local_size, num_chunks, rank)

    def _split_tensor(
        self,
        tensor: torch.Tensor,
        num_chunks: int,
        *,
        with_padding: bool = True,
        contiguous: bool = True,
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Return all parts of a tensor and the padding of each; torch's name.

        Args:
            tensor: The full tensor.
            num_chunks: Number of parts.
            with_padding: Pad short parts with zeros to the size of the first one.
            contiguous: Copy parts that are not contiguous.
        """
        parts, pads = _chunks(tensor, num_chunks, self.dim), list[int]()
        if with_padding:
            pads = [parts[0].size(self.dim) - part.size(self.dim) for part in parts]
            parts = [pad_tensor(p, self.dim, n) for p, n in zip(parts, pads, strict=True)]
        return [part.contiguous() for part in parts] if contiguous else parts, pads

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim})"

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, repr=False)
class StridedShard(Shard):
    """Ranks have a part of each of `split_factor` runs of a dimension.

    It results from flattening dimensions of which an inner one is cut, and from cutting a dimension
    along a later axis first: FSDP over tensor parallelism is ``(StridedShard(0, split_factor=tp),
    Shard(0))``.

    Example:
        ```python
        from dure.tensor import DTensor
        from dure.tensor.placement_types import StridedShard

        parts = StridedShard(0, split_factor=2)  # a part of each half of the rows
        mine = torch.tensor([0, 2] if dist.get_rank() == 0 else [1, 3])
        assert DTensor.from_local(mine, mesh, [parts]).full_tensor().tolist() == [0, 1, 2, 3]
        ```
    """

    split_factor: int

    def __init__(self, dim: int, *, split_factor: int) -> None:
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "split_factor", split_factor)
        self.__post_init__()

    def _split_tensor(
        self,
        tensor: torch.Tensor,
        num_chunks: int,
        *,
        with_padding: bool = True,
        contiguous: bool = True,
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Return all parts of a tensor and the padding that each would need; torch's name.

        As in torch, the parts are not padded; the arguments are those of `Shard`.
        """
        runs = [
            _chunks(run, num_chunks, self.dim)
            for run in _chunks(tensor, self.split_factor, self.dim)
        ]
        parts = [torch.cat(pieces, self.dim) for pieces in zip(*runs, strict=True)]
        sizes = [part.size(self.dim) for part in parts]
        return parts, [max(sizes) - size for size in sizes] if with_padding else []

    def __repr__(self) -> str:
        return f"_StridedShard(dim={self.dim}, sf={self.split_factor})"

    def __str__(self) -> str:
        return f"_S({self.dim}, {self.split_factor})"


@dataclass(frozen=True, repr=False)
class Replicate(Placement):
    """Each rank has the full tensor, or the same part if another axis cuts it.

    Example:
        ```python
        from dure.tensor import Replicate

        assert rows.redistribute(placements=[Replicate()]).to_local().shape == (5, 2)
        ```
    """

    def __repr__(self) -> str:
        return "Replicate()"

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, repr=False)
class Partial(Placement):
    """Each rank has a term of the same shape; the value is their reduction.

    Args:
        reduce_op: "sum", "avg", "min", "max" or "product".

    Raises:
        PlacementError: Another reduction.

    Example:
        ```python
        from dure.tensor import DTensor, Partial

        terms = DTensor.from_local(torch.ones(2), mesh, [Partial()])  # one from each rank
        assert terms.full_tensor().tolist() == [2.0, 2.0]
        ```
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCTIONS:
            raise PlacementError(
                "no such reduction", seen=f"{self.reduce_op!r}; there are {', '.join(REDUCTIONS)}"
            )

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"

    def __str__(self) -> str:
        return f"P({self.reduce_op})"


class MaskPartial(Partial):
    """torch's placement for a lookup in a table sharded by rows; no operator returns it here.

    Obtained from:
        No function of Dure; the class is here for programs that compare with it.
    """


# Torch's names.
_StridedShard, _MaskPartial = StridedShard, MaskPartial  # pyright: ignore[reportUnusedVariable]
