"""Context parallelism: ring attention over a sequence that is divided over the ranks of an axis.

*Order of the sequence.* Under a causal mask later positions attend to more keys than earlier ones.
To balance the load, each rank has two parts: of 2n equal chunks, rank r has chunk r and chunk
2n - 1 - r. Then half of the pairs of rank r's queries and rank j's keys are computed, for all r, j:

    j == r    a causal mask, as if the two chunks were the complete sequence
    j <  r    both chunks of r attend to the first chunk of j, none to the second
    j >  r    the second chunk of r attends to both chunks of j, the first to none

*Ring.* Keys and values are sent from rank to rank, n - 1 times; while a rank computes on one block,
it receives the next. The outputs of blocks are combined by the logarithms of their sums of
exponentials (*lse*), so the result equals attention over the full sequence. In backward the blocks
go around once more, and the gradients of keys and values travel with them to their owner.

Cost:
    A rank sends its keys and values n - 1 times forward; backward as often, and their gradients n
    times. Memory: two more blocks.

Source: ring attention, https://arxiv.org/abs/2310.01889; its load balance,
https://arxiv.org/abs/2311.09431.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from dure import torch_private
from dure.comm.group import ProcessGroup
from dure.comm.work import Work
from dure.errors import MeshError, ShapeError, UsageError
from dure.mesh import DeviceMesh

__all__ = [
    "context_parallel",
    "context_parallel_batch",
    "context_parallel_unshard",
    "positions_of",
    "ring_attention",
]

Tensors = tuple[torch.Tensor, ...]


def positions_of(length: int, n: int, rank: int) -> torch.Tensor:
    """Return the positions of a sequence that a rank has: int64 [length / n].

    Args:
        length: Length of the sequence; a multiple of 2n.
        n: Number of ranks.
        rank: The rank along the axis.

    Returns:
        The positions: a piece of the first half and the mirrored one of the second.

    Raises:
        ShapeError: `length` is not a multiple of 2n.

    Example:
        ```python
        from dure.tensor import experimental

        assert experimental.positions_of(8, 2, 0).tolist() == [0, 1, 6, 7]
        assert experimental.positions_of(8, 2, 1).tolist() == [2, 3, 4, 5]
        ```
    """
    if length % (2 * n):
        raise ShapeError(
            "the length of the sequence is not a multiple of twice the number of ranks",
            op="context_parallel",
            seen=f"length {length}, {n} ranks",
            fix=f"Pad it to a multiple of {2 * n}; context_parallel_batch does that, and masks.",
        )
    chunks = torch.arange(length, device="cpu").chunk(2 * n)
    return torch.cat([chunks[rank], chunks[2 * n - 1 - rank]])


def _group_of(mesh: DeviceMesh) -> ProcessGroup:
    if mesh.ndim != 1:
        raise MeshError(
            "context parallelism needs a mesh of one axis",
            op="context_parallel",
            seen=f"{mesh!r}",
            fix='Pass one axis, such as mesh["cp"].',
        )
    return mesh.get_group()


# ---- one block -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _AttentionBlock:
    """The queries of this rank and the keys of a block that attend to each other.

    Attributes:
        queries: Slice of this rank's positions.
        keys: Slice of the block's positions.
        causal: Whether a query attends to no later key.
    """

    queries: slice
    keys: slice
    causal: bool


def _block_of(rank: int, owner: int, length: int, causal: bool) -> _AttentionBlock:
    both, half = slice(0, length), length // 2
    if not causal or owner == rank:
        return _AttentionBlock(both, both, causal)
    if owner < rank:
        return _AttentionBlock(both, slice(0, half), False)
    return _AttentionBlock(slice(half, length), both, False)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: at least float32."""
    return torch.promote_types(dtype, torch.float32)


Numbers = tuple[torch.Tensor, torch.Tensor] | None
"""Document numbers of queries and of keys, [B, S] each; keys with a number below 0 are padding."""


def _uses_kernel(q: torch.Tensor) -> bool:
    """Return whether torch has a kernel that returns the lse."""
    return q.device.type == "cpu"


def _bias(q: torch.Tensor, k: torch.Tensor, causal: bool, numbers: Numbers) -> torch.Tensor | None:
    """Return 0 where a query may attend to a key, else -inf; None if the kernel needs no bias."""
    if numbers is None and (not causal or _uses_kernel(q)):
        return None
    allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
    allowed = allowed.tril() if causal else allowed
    if numbers is not None:
        queries, keys = numbers[0].unsqueeze(-1), numbers[1].unsqueeze(-2)
        allowed = (allowed & (queries == keys) & (keys >= 0)).unsqueeze(1)
    return torch.zeros_like(allowed, dtype=q.dtype).masked_fill_(~allowed, -math.inf)


def _scores(
    q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> torch.Tensor:
    scores = (q @ k.transpose(-2, -1)).to(_wide(q.dtype)) * scale
    return scores if bias is None else scores + bias


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, numbers: Numbers, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output [.., S, D] and lse [.., S] of attention within a block."""
    bias = _bias(q, k, causal, numbers)
    if _uses_kernel(q):
        kernel = torch_private.flash_attention
        output, lse = kernel(
            q, k, v, 0.0, causal and bias is None, attn_mask=bias, scale=scale
        )  # fmt: skip
    else:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        weights = _scores(q, k, bias, scale)
        lse = weights.logsumexp(-1)
        weights = torch.exp(weights - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
        output = weights.to(v.dtype) @ v
    if bias is not None:  # of a query without keys, for which the kernel returns 0
        lse = lse.masked_fill(bias.amax(-1) == -math.inf, -math.inf)
    return output, lse


def _backward(
    grad: torch.Tensor, saved: Tensors, causal: bool, numbers: Numbers, scale: float
) -> Tensors:
    """Return the gradients of q, k and v of a block from output and lse over all blocks."""
    q, k, v, output, lse = saved
    bias = _bias(q, k, causal, numbers)
    if _uses_kernel(q):
        kernel = torch_private.flash_attention_backward
        triangle = causal and bias is None
        return kernel(grad, *saved, 0.0, triangle, attn_mask=bias, scale=scale)
    groups, each = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(each, 1) for t in (k, v))
    weights = torch.exp(_scores(q, k, bias, scale) - lse.unsqueeze(-1))
    grad_v = weights.to(grad.dtype).transpose(-2, -1) @ grad
    wide = _wide(q.dtype)
    inner = (grad.to(wide) * output.to(wide)).sum(-1, keepdim=True)
    grad_scores = weights * ((grad @ v.transpose(-2, -1)).to(wide) - inner) * scale
    grad_scores = grad_scores.to(q.dtype)
    grad_k = grad_scores.transpose(-2, -1) @ q
    of_keys = (t.unflatten(1, (groups, each)).sum(2) for t in (grad_k, grad_v))
    return grad_scores @ k, *of_keys


# ---- the ring ------------------------------------------------------------------------------------


class _RingExchange:
    """A send of tensors to the next rank of the ring, and a receive from the previous one."""

    def __init__(self, group: ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
        rank, n = group.rank(), group.size()
        self._sent = [t.contiguous() for t in tensors]
        self._received = [torch.empty_like(t) for t in self._sent]
        self._works: list[Work | None] = []
        with group.together(self._sent):
            for tag, (out, into) in enumerate(zip(self._sent, self._received, strict=True)):
                self._works.append(group.irecv(into, (rank - 1) % n, tag))
                self._works.append(group.send(out, (rank + 1) % n, tag, async_op=True))

    def wait(self) -> list[torch.Tensor]:
        """Wait for both, and return the tensors that were received."""
        for work in self._works:
            if work is not None:
                work.wait()
        return self._received


def _blocks(
    k: torch.Tensor, v: torch.Tensor, numbers: Numbers, group: ProcessGroup, causal: bool
) -> Iterator[tuple[_AttentionBlock, torch.Tensor, torch.Tensor, Numbers]]:
    """Yield for each rank the keys and values that this rank's queries attend to.

    The next block is received while the caller computes.
    """
    n, rank = group.size(), group.rank()
    block = [k, v] if numbers is None else [k, v, numbers[1]]
    for step in range(n):
        exchange = _RingExchange(group, block) if step < n - 1 else None
        part = _block_of(rank, (rank - step) % n, k.shape[-2], causal)
        keys, values, *theirs = block
        seen = None
        if numbers is not None:
            seen = numbers[0][..., part.queries], theirs[0][..., part.keys]
        yield part, keys[..., part.keys, :], values[..., part.keys, :], seen
        block = block if exchange is None else exchange.wait()


class _Ring(torch.autograd.Function):
    """Attention of this rank's queries to all ranks' keys."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        numbers: Numbers,
        group: ProcessGroup,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        wide = _wide(q.dtype)
        output = torch.zeros_like(q, dtype=wide)
        lse = torch.full(q.shape[:-1], -math.inf, dtype=wide, device=q.device)
        for part, keys, values, seen in _blocks(k, v, numbers, group, causal):
            new = _forward(q[..., part.queries, :], keys, values, part.causal, seen, scale)
            _combine(output[..., part.queries, :], lse[..., part.queries], *new)
        result = output.to(q.dtype)
        lse = lse.masked_fill(lse == -math.inf, 0.0)
        ctx.save_for_backward(q, k, v, result, lse, *(numbers or ()))
        ctx.group, ctx.causal, ctx.scale = group, causal, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, output, lse, *numbers = ctx.saved_tensors
        (grad,), group = grads, ctx.group
        wide = _wide(q.dtype)
        grad_q = torch.zeros_like(q, dtype=wide)
        travelling = [torch.zeros_like(t, dtype=wide) for t in (k, v)]
        blocks = _blocks(k, v, tuple(numbers) or None, group, ctx.causal)
        for part, keys, values, seen in blocks:
            rows = part.queries
            saved = (q[..., rows, :], keys, values, output[..., rows, :], lse[..., rows])
            found = _backward(grad[..., rows, :], saved, part.causal, seen, ctx.scale)
            grad_q[..., rows, :] += found[0]
            for total, one in zip(travelling, found[1:], strict=True):
                total[..., part.keys, :] += one
            travelling = _RingExchange(group, travelling).wait() if group.size() > 1 else travelling
        grad_k, grad_v = (t.to(k.dtype) for t in travelling)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None, None


def _combine(
    output: torch.Tensor, lse: torch.Tensor, new: torch.Tensor, new_lse: torch.Tensor
) -> None:
    """Combine the output of a block with that of the blocks before, in place."""
    total = torch.logaddexp(lse, new_lse)
    safe = total.masked_fill(total == -math.inf, 0.0)
    output.mul_(torch.exp(lse - safe).unsqueeze(-1))
    output.add_(new * torch.exp(new_lse - safe).unsqueeze(-1))
    lse.copy_(total)


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: ProcessGroup,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Return this rank's part of attention over a sequence that is divided over a group.

    Args:
        q: Queries [B, H, S, D] of this rank's positions (`positions_of`).
        k, v: Keys and values [B, G, S, D], G dividing H.
        group: The ranks.
        mask: A mask of this rank's positions that broadcasts to [B, 1, 1, S]. Bool: the keys that
            may be attended to. Integers: the document of each position; a query attends to the
            keys of its document, and numbers below 0 mean padding, which attends to nothing and is
            not attended to.
        is_causal: Whether a position attends to no later one.
        scale: Scale of the scores; 1 / sqrt(D) if None.

    Returns:
        The output [B, H, S, D]; 0 for a query that attends to no key.

    Raises:
        ShapeError: The heads of the keys do not divide those of the queries.

    Collective:
        All ranks of the group, with parts of one shape, and a mask on all or none.
    """
    if q.shape[1] % k.shape[1]:
        raise ShapeError(
            "the heads of the keys must divide those of the queries",
            op="ring_attention",
            seen=f"{q.shape[1]} and {k.shape[1]}",
        )
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    numbers = None
    if mask is not None:
        own = mask.expand(q.shape[0], 1, 1, q.shape[-2])[:, 0, 0]
        numbers = (own, own)
        if own.dtype == torch.bool:  # all queries belong to one document
            numbers = torch.zeros_like(own, dtype=torch.int32), own.int() - 1
    return _Ring.apply(q, k, v, numbers, group, is_causal, scale)  # pyright: ignore


# ---- public functions ----------------------------------------------------------------------------


class _RingMode(TorchFunctionMode):
    """Replaces `scaled_dot_product_attention` by ring attention."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        op = "scaled_dot_product_attention"
        if dropout_p:
            raise UsageError(
                "ring attention does not support dropout", op=op, seen=f"dropout_p={dropout_p}"
            )
        if attn_mask is not None and (
            attn_mask.is_floating_point() or attn_mask.shape[-3:-1].numel() != 1
        ):
            raise UsageError(
                "ring attention supports masks of positions, not of pairs of positions",
                op=op,
                seen=f"{attn_mask.dtype} {list(attn_mask.shape)}",
                fix="Pass a mask [B, 1, 1, S] of this rank's positions, either bool, True for keys "
                "that may be attended to, or document numbers; and is_causal.",
            )
        if key.shape[1] != query.shape[1] and not enable_gqa:
            raise ShapeError(
                "keys and queries have different numbers of heads",
                op=op,
                seen=f"{key.shape[1]} and {query.shape[1]}",
                fix="Pass enable_gqa=True.",
            )
        return ring_attention(
            query, key, value,
            group=self._group, mask=attn_mask, is_causal=is_causal, scale=scale,
        )  # fmt: skip


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[torch.Tensor] | None = None,
) -> Iterator[None]:
    """Divide sequences over the ranks of a mesh, for the length of a `with` block.

    Within the block the buffers contain this rank's positions (`positions_of`), and
    `torch.nn.functional.scaled_dot_product_attention` attends to the keys of all ranks. Backward
    may run after the block. Activation checkpointing recomputes attention outside of it, and needs
    ``torch.utils.checkpoint(..., use_reentrant=False, context_fn=lambda: (nullcontext(),
    context_parallel(mesh)))``; without that it raises `CheckpointError`.

    Args:
        mesh: A mesh of one axis.
        buffers: Tensors with the full sequence on every rank: inputs, labels, positions.
        buffer_seq_dims: For each buffer the dimension of the sequence.
        no_restore_buffers: Buffers that need not be restored after the block.

    Raises:
        MeshError: The mesh has more than one axis.
        ShapeError: A sequence's length is not a multiple of twice the number of ranks.
        UsageError: `buffers` and `buffer_seq_dims` have different lengths; within the block:
            dropout, or a mask of pairs of positions.

    Collective:
        Attention within the block: all ranks of the mesh.

    Cost:
        Per attention each rank sends its keys and values n - 1 times; backward the same, and their
        gradients n times.

    Example:
        ```python
        from dure.tensor import init_device_mesh
        from dure.tensor.experimental import context_parallel, context_parallel_unshard

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        torch.manual_seed(0)
        q = torch.randn(1, 2, 8, 4)  # the full sequence of 8 positions, on every rank
        full = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        with context_parallel(mesh, buffers=[q], buffer_seq_dims=[2]):
            part = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert part.shape == (1, 2, 4, 4)
        (output,) = context_parallel_unshard(mesh, [part], [2])
        assert torch.allclose(output, full, atol=1e-5)
        ```
    """
    group = _group_of(mesh)
    tensors, dims = list(buffers or ()), list(buffer_seq_dims or ())
    if len(tensors) != len(dims):
        raise UsageError(
            "buffer_seq_dims must have one entry for each buffer",
            op="context_parallel",
            seen=f"{len(tensors)} buffers, {len(dims)} buffer_seq_dims",
        )
    kept = {id(tensor) for tensor in no_restore_buffers or ()}
    originals = [None if id(t) in kept else t.detach().clone() for t in tensors]
    parts = [_part(t, dim, group) for t, dim in zip(tensors, dims, strict=True)]
    for tensor, part in zip(tensors, parts, strict=True):
        _replace(tensor, part)
    try:
        with _RingMode(group):
            yield
    finally:
        for tensor, before in zip(tensors, originals, strict=True):
            if before is not None:
                _replace(tensor, before)


def _part(tensor: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    positions = positions_of(tensor.shape[dim], group.size(), group.rank())
    return tensor.detach().index_select(dim, positions.to(tensor.device))


def _replace(tensor: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.resize_(values.shape)
        tensor.copy_(values)


def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int]
) -> list[torch.Tensor]:
    """Return full tensors, gathered from the positions that each rank has, such as outputs.

    Args:
        mesh: A mesh of one axis.
        buffers: Tensors with this rank's positions.
        seq_dims: For each tensor the dimension of the sequence.

    Returns:
        The full tensors, outside of autograd.

    Raises:
        MeshError: The mesh has more than one axis.

    Collective:
        All ranks of the mesh, with parts of one shape.

    Cost:
        One all_gather for each tensor.

    Example:
        ```python
        mesh = dist.init_device_mesh("cpu", (2,))
        mine = experimental.positions_of(8, 2, dist.get_rank())  # as an output of this rank
        (full,) = experimental.context_parallel_unshard(mesh, [mine], [0])
        assert full.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
        ```
    """
    group = _group_of(mesh)
    n = group.size()
    found: list[torch.Tensor] = []
    for tensor, dim in zip(buffers, seq_dims, strict=True):
        parts = [torch.empty_like(tensor) for _ in range(n)]
        group.all_gather(parts, tensor.detach().contiguous())
        length = tensor.shape[dim] * n
        order = torch.cat([positions_of(length, n, rank) for rank in range(n)])
        joined = torch.cat(parts, dim)
        found.append(joined.index_select(dim, order.argsort().to(tensor.device)))
    return found


def context_parallel_batch(
    mesh: DeviceMesh,
    batch: Mapping[str, Any],
    *,
    pad_token_id: int = 0,
    ignore_index: int = -100,
) -> dict[str, Any]:
    """Return this rank's part of a batch for a causal language model.

    Labels are shifted *before* the sequence is cut, so the loss of a part needs no shift. Positions
    are those of the full sequence. The sequence is padded to a length that divides; padding is
    masked in attention and ignored by the loss. If several documents are packed into a row, tokens
    attend only to their document, positions start at 0 in each document, and its last token has no
    label.

    Args:
        mesh: A mesh of one axis.
        batch: ``input_ids`` [B, S]; optionally ``labels`` [B, S], not shifted (default:
            input_ids), ``attention_mask`` [B, S], True or 1 for tokens that are not padding,
            ``document_ids`` [B, S], integers from 0, equal within a document, and ``position_ids``
            [B, S]. Other tensors [B, S, ...] are padded with 0 and cut; other values are returned
            unchanged.
        pad_token_id: Value of padding in ``input_ids``.
        ignore_index: Value of labels that the loss ignores.

    Returns:
        A dict with ``input_ids``, ``labels`` (the next tokens) and ``position_ids``, all
        [B, S / n]; ``attention_mask``, [B, 1, 1, S / n] to pass to attention, or None if no
        position is masked; ``tokens``, the number of labels on all ranks together that are not
        ignored, by which the sum of the ranks' losses is divided; and other entries of `batch`.

    Raises:
        MeshError: The mesh has more than one axis.

    Cost:
        No communication: each rank cuts its part from the full batch.

    Example:
        ```python
        batch = {"input_ids": torch.arange(8).view(1, 8)}
        part = experimental.context_parallel_batch(mesh, batch)
        assert part["input_ids"].shape == (1, 4)
        assert part["tokens"] == 7  # the last token has no next one
        ```
    """
    group = _group_of(mesh)
    ids = batch["input_ids"]
    length = ids.shape[1]
    missing = -length % (2 * group.size())
    counts = batch.get("attention_mask", torch.ones_like(ids)).bool()
    documents = batch.get("document_ids")
    numbers = torch.zeros_like(ids) if documents is None else documents
    begins = F.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0))
    labels = torch.full_like(batch.get("labels", ids), ignore_index)
    known = counts[:, :-1] & counts[:, 1:] & ~begins[:, 1:]
    labels[:, :-1] = batch.get("labels", ids)[:, 1:].masked_fill(~known, ignore_index)
    places = torch.arange(length, device=ids.device).expand_as(ids)
    mask = None
    if documents is not None:
        mask = F.pad(documents.masked_fill(~counts, -1), (0, missing), value=-1)
    elif missing or not bool(counts.all()):
        mask = F.pad(counts, (0, missing))
    made: dict[str, Any] = {
        "position_ids": places - places.masked_fill(~begins, 0).cummax(1).values,
        **{name: value for name, value in batch.items() if name != "document_ids"},
        "labels": labels,
    }
    fill = {"input_ids": pad_token_id, "labels": ignore_index}
    for name, value in made.items():
        if isinstance(value, torch.Tensor) and value.shape[:2] == ids.shape:
            ends = (*(0, 0) * (value.ndim - 2), 0, missing)
            made[name] = _part(F.pad(value, ends, value=fill.get(name, 0)), 1, group)
    made["attention_mask"] = None if mask is None else _part(mask[:, None, None], 3, group)
    return made | {"tokens": (labels != ignore_index).sum()}
