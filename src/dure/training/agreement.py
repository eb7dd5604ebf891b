"""Do the ranks have the same tensors? Asked before they are taken for replicas of each other.

Each rank describes its tensors (name, shape, dtype, memory order), one line for each. A digest of
32 bytes decides; only where digests differ do the ranks exchange the lines, so that the error can
name the first difference and say what each rank has there.

Tensors that are the same in kind get one rank's values (`broadcast_tensors`): large ones travel as
they are, the small ones, of which a model has many, packed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch

from dure.comm.work import combine
from dure.errors import ModuleError
from dure.training.flat_buffers import SMALL_BYTES, by_kind, dense_strides, packed, unpack

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = [
    "broadcast_tensors",
    "describe_tensor",
    "gather_texts",
    "verify_equal",
]

_NOTHING = "nothing more"
_ROOT = 0


def describe_tensor(name: str, tensor: torch.Tensor) -> str:
    """Describe what ranks must agree on, as people read it: ``fc.weight float32[10, 4]``."""
    text = f"{name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    strides = dense_strides(tensor)
    if strides != tuple(torch.empty(tensor.shape, device="meta").stride()):
        text += f" with strides {list(strides)}"
    return text + (" (trained)" if tensor.requires_grad else "")


def verify_equal(group: ProcessGroup, descriptions: Sequence[str], what: str = "modules") -> None:
    """Raise unless all ranks of `group` have the same `descriptions`.

    Args:
        group: The ranks.
        descriptions: One line for each tensor; its first word is the tensor's name.
        what: The owner of the tensors, for the error.

    Collective:
        All ranks of the group call; all of them raise.

    Cost:
        One all_gather of 32 bytes.

    Raises:
        ModuleError: With the first difference, and what each rank has there.
    """
    text = "\n".join(descriptions).encode()
    digest = torch.frombuffer(bytearray(hashlib.sha256(text).digest()), dtype=torch.uint8)
    digest = digest.to(group.message_device)
    digests = [torch.empty_like(digest) for _ in range(group.size())]
    group.all_gather(digests, digest)
    if all(torch.equal(d, digest) for d in digests):
        return  # and so does every other rank: a difference is seen by all of them
    texts = gather_texts(group, text)
    for position, entries in enumerate(zip_longest(*texts, fillvalue=_NOTHING)):
        if len(set(entries)) > 1:
            raise _difference(group, position, entries, what)


def gather_texts(group: ProcessGroup, text: bytes) -> list[list[str]]:
    """Exchange texts of different lengths; return the lines of each rank's.

    Collective:
        All ranks of the group.
    """
    device = group.message_device
    length = torch.tensor([len(text)], device=device)
    lengths = [torch.empty_like(length) for _ in range(group.size())]
    group.all_gather(lengths, length)
    longest = max(int(n) for n in lengths)
    mine = torch.frombuffer(bytearray(text.ljust(longest) or b" "), dtype=torch.uint8)
    mine = mine[:longest].to(device)
    theirs = [torch.empty_like(mine) for _ in range(group.size())]
    group.all_gather(theirs, mine)
    raw = [t.cpu().numpy().tobytes()[: int(n)] for t, n in zip(theirs, lengths, strict=True)]
    return [r.decode().splitlines() for r in raw]


def _difference(
    group: ProcessGroup, position: int, entries: Sequence[str], what: str
) -> ModuleError:
    """Make the error about the first difference between the ranks."""
    having: dict[str, list[int]] = {}
    for rank, entry in enumerate(entries):
        having.setdefault(entry, []).append(rank)
    seen = ", ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} "
        f"ha{'ve' if len(ranks) > 1 else 's'} {entry}"
        for entry, ranks in having.items()
    )
    names = tuple(sorted({e.split()[0] for e in entries if e != _NOTHING}))
    return ModuleError(
        f"the ranks' {what} differ",
        parameters=names,
        rank=group.rank(),
        world_size=group.size(),
        group=group.group_name,
        seen=f"the first difference is at tensor number {position}: {seen}",
        fix="Build the same module on every rank, and make all changes to it before this call.",
    )


def broadcast_tensors(
    group: ProcessGroup, tensors: Sequence[torch.Tensor], root: int = _ROOT
) -> None:
    """Overwrite `tensors` with those of the rank `root`.

    Collective:
        All ranks of the group call with tensors of the same shapes and dtypes.

    Cost:
        One broadcast for each tensor of more than 64 KiB, all started before the first is waited
        for, and one for all smaller ones of a dtype and device.
    """
    small = by_kind(t for t in tensors if t.nbytes <= SMALL_BYTES)
    with torch.no_grad():
        large = [t.detach() for t in tensors if t.nbytes > SMALL_BYTES]
        works = [group.broadcast(tensor, root, async_op=True) for tensor in large]
        started = combine([work for work in works if work is not None], large, True)
        for same_kind in small.values():
            flat = packed(same_kind)
            group.broadcast(flat, root)
            if group.rank() != root:
                unpack(flat, same_kind)
    if started is not None:
        started.wait()
