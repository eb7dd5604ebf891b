"""Context parallelism: the sequence divided over the ranks of an axis, attention around a ring.

*Order of the sequence.* Under a causal mask later positions attend to more than earlier ones. So a
rank has two parts: of 2n equal chunks, rank r has chunk r and chunk 2n - 1 - r. What it attends to
of rank j's chunks is then half of all pairs, whatever r and j are:

    j == r    causal, as if the two chunks were all there is
    j <  r    both own chunks attend to the first of j's, none to the second
    j >  r    the second own chunk attends to both of j's, the first to none

*Ring.* Keys and values go from rank to rank, n - 1 times; while a rank computes on one block, the
next is on its way. The outputs of blocks are joined by the logarithms of their sums (*lse*), so the
result is that of whole attention. In backward the blocks go around once more, and the gradients of
keys and values travel with them to their owner.

Cost: a rank sends its keys and values n - 1 times forward; backward as often, and their gradients n
times. Memory: two blocks besides its own.

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
    """Return which positions of a sequence a rank has: int64 [length / n].

    Args:
        length: Of the sequence; a multiple of 2n.
        n: Ranks.
        rank: Which of them.
    """
    if length % (2 * n):
        raise ShapeError(
            "the sequence does not divide into two chunks for each rank",
            op="context_parallel",
            seen=f"length {length}, {n} ranks",
            fix=f"Pad it to a multiple of {2 * n}; context_parallel_batch does, and masks.",
        )
    chunks = torch.arange(length, device="cpu").chunk(2 * n)
    return torch.cat([chunks[rank], chunks[2 * n - 1 - rank]])


def _group_of(mesh: DeviceMesh) -> ProcessGroup:
    if mesh.ndim != 1:
        raise MeshError(
            "context parallelism takes one axis of a mesh",
            op="context_parallel",
            seen=f"{mesh!r}",
            fix='Pass mesh["cp"], or however the axis is called.',
        )
    return mesh.get_group()


# ---- one block -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Block:
    """Which queries attend to which keys of the rank whose block is here.

    Attributes:
        queries, keys: Slices of the sequence.
        causal: Whether a query attends to no later key.
    """

    queries: slice
    keys: slice
    causal: bool


def _block_of(rank: int, owner: int, length: int, causal: bool) -> _Block:
    whole, half = slice(0, length), length // 2
    if not causal or owner == rank:
        return _Block(whole, whole, causal)
    if owner < rank:
        return _Block(whole, slice(0, half), False)
    return _Block(slice(half, length), whole, False)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return what sums are kept in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


Numbers = tuple[torch.Tensor, torch.Tensor] | None
"""Numbers of the queries' and of the keys' documents, [B, S] each; a key below 0 is padding."""


def _uses_kernel(q: torch.Tensor) -> bool:
    """Tell whether torch's kernel, which tells the lse, can be used."""
    return q.device.type == "cpu"


def _bias(q: torch.Tensor, k: torch.Tensor, causal: bool, numbers: Numbers) -> torch.Tensor | None:
    """Return 0 where a query may attend to a key, else -inf; None where the kernel needs none."""
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
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, lse = kernel(
            q, k, v, 0.0, causal and bias is None, attn_mask=bias, scale=scale
        )  # fmt: skip
    else:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        weights = _scores(q, k, bias, scale)
        lse = weights.logsumexp(-1)
        weights = torch.exp(weights - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
        output = weights.to(v.dtype) @ v
    if bias is not None:  # a query without keys; the kernel tells 0
        lse = lse.masked_fill(bias.amax(-1) == -math.inf, -math.inf)
    return output, lse


def _backward(
    grad: torch.Tensor, saved: Tensors, causal: bool, numbers: Numbers, scale: float
) -> Tensors:
    """Return the gradients of q, k and v of a block, given output and lse of all blocks."""
    q, k, v, output, lse = saved
    bias = _bias(q, k, causal, numbers)
    if _uses_kernel(q):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
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


class _Turn:
    """Tensors on their way to the next rank of the ring, and others on theirs to this one."""

    def __init__(self, group: ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
        rank, n = group.rank(), group.size()
        self._sent = [t.contiguous() for t in tensors]
        self._came = [torch.empty_like(t) for t in self._sent]
        self._works: list[Work | None] = []
        with group.together(self._sent):
            for tag, (out, into) in enumerate(zip(self._sent, self._came, strict=True)):
                self._works.append(group.irecv(into, (rank - 1) % n, tag))
                self._works.append(group.send(out, (rank + 1) % n, tag, async_op=True))

    def wait(self) -> list[torch.Tensor]:
        """Return what has come, when all has."""
        for work in self._works:
            if work is not None:
                work.wait()
        return self._came


def _blocks(
    k: torch.Tensor, v: torch.Tensor, numbers: Numbers, group: ProcessGroup, causal: bool
) -> Iterator[tuple[_Block, torch.Tensor, torch.Tensor, Numbers]]:
    """Yield what this rank's queries attend to of each rank's keys; the next are on their way."""
    n, rank = group.size(), group.rank()
    block = [k, v] if numbers is None else [k, v, numbers[1]]
    for step in range(n):
        turn = _Turn(group, block) if step < n - 1 else None
        part = _block_of(rank, (rank - step) % n, k.shape[-2], causal)
        keys, values, *theirs = block
        seen = None
        if numbers is not None:
            seen = numbers[0][..., part.queries], theirs[0][..., part.keys]
        yield part, keys[..., part.keys, :], values[..., part.keys, :], seen
        block = block if turn is None else turn.wait()


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
            _join(output[..., part.queries, :], lse[..., part.queries], *new)
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
            travelling = _Turn(group, travelling).wait() if group.size() > 1 else travelling
        grad_k, grad_v = (t.to(k.dtype) for t in travelling)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None, None


def _join(
    output: torch.Tensor, lse: torch.Tensor, new: torch.Tensor, new_lse: torch.Tensor
) -> None:
    """Add a block's output to that of the blocks before, in place."""
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
        mask: Of this rank's positions, broadcasting to [B, 1, 1, S]. Of bool: which keys may be
            attended to. Of integers: which document a position belongs to; a query attends to the
            keys of its own. What is below 0 is padding, which attends to nothing, and is not
            attended to.
        is_causal: Whether a position attends to no later one.
        scale: Of the scores; 1 / sqrt(D) where None.

    Shapes:
        The result is [B, H, S, D]; 0 for a query that attends to nothing.

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
        if own.dtype == torch.bool:  # one document, of which all queries are
            numbers = torch.zeros_like(own, dtype=torch.int32), own.int() - 1
    return _Ring.apply(q, k, v, numbers, group, is_causal, scale)  # pyright: ignore


# ---- what a program sees -------------------------------------------------------------------------


class _RingMode(TorchFunctionMode):
    """Runs `scaled_dot_product_attention` around the ring."""

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
                "attention around a ring drops nothing out", op=op, seen=f"dropout_p={dropout_p}"
            )
        if attn_mask is not None and (
            attn_mask.is_floating_point() or attn_mask.shape[-3:-1].numel() != 1
        ):
            raise UsageError(
                "attention around a ring takes masks of positions, not of pairs",
                op=op,
                seen=f"{attn_mask.dtype} {list(attn_mask.shape)}",
                fix="Pass a mask [B, 1, 1, S] of this rank's positions, bool for keys that count "
                "or the numbers of documents, and is_causal.",
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

    Within the block the buffers hold this rank's positions (`positions_of`), and
    `torch.nn.functional.scaled_dot_product_attention` attends to all ranks' keys. Backward may run
    after it. It does not see attention that backward computes again; that needs
    ``torch.utils.checkpoint(..., use_reentrant=False, context_fn=lambda: (nullcontext(),
    context_parallel(mesh)))``, and raises `CheckpointError` without.

    Args:
        mesh: Of one axis.
        buffers: Tensors that have the whole sequence on every rank: inputs, labels, positions.
        buffer_seq_dims: The dimension of the sequence of each.
        no_restore_buffers: Those that need not be whole again after the block.

    Raises:
        ShapeError: A length is no multiple of two chunks a rank.
        UsageError: Buffers and dimensions differ in number; within: dropout, or a mask of pairs.

    Collective:
        All ranks of the mesh.
    """
    group = _group_of(mesh)
    tensors, dims = list(buffers or ()), list(buffer_seq_dims or ())
    if len(tensors) != len(dims):
        raise UsageError(
            "each buffer has a dimension of the sequence",
            op="context_parallel",
            seen=f"{len(tensors)} buffers, {len(dims)} buffer_seq_dims",
        )
    kept = {id(tensor) for tensor in no_restore_buffers or ()}
    whole = [None if id(t) in kept else t.detach().clone() for t in tensors]
    parts = [_part(t, dim, group) for t, dim in zip(tensors, dims, strict=True)]
    for tensor, part in zip(tensors, parts, strict=True):
        _replace(tensor, part)
    try:
        with _RingMode(group):
            yield
    finally:
        for tensor, before in zip(tensors, whole, strict=True):
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
    """Return the whole of tensors of which each rank has its positions, such as outputs.

    Collective:
        All ranks of the mesh, with parts of one shape.
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
    """Return this rank's part of a batch for a causal language model, ready for the model.

    Labels are shifted *before* the sequence is cut, so that a loss of the parts, without any shift,
    is the loss of the whole; positions are those of the whole sequence; what does not divide is
    padded, masked for attention, and ignored by the loss. Tokens of several documents that are
    packed into a row attend to their own alone, count positions from its beginning, and predict
    nothing of the next.

    Args:
        mesh: Of one axis.
        batch: ``input_ids`` [B, S]; optionally ``labels`` [B, S], not shifted (input_ids where
            they are not given), ``attention_mask`` [B, S], True or 1 where a token counts,
            ``document_ids`` [B, S], integers from 0, equal in a document, and ``position_ids``
            [B, S]. Other tensors [B, S, ...] are padded with 0 and cut; all else stays as it is.
        pad_token_id: What inputs are padded with.
        ignore_index: What labels are where there is no next token.

    Returns:
        ``input_ids``, ``labels`` (of the next token), ``position_ids``, all [B, S / n];
        ``attention_mask`` [B, 1, 1, S / n], to be given to attention as it is (see `mask` of
        `ring_attention`), None where every token counts; ``tokens``, how many labels count on all
        ranks together: the sum of the parts' losses is divided by it.

    Cost:
        No communication: each rank cuts from the batch that all have.
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
