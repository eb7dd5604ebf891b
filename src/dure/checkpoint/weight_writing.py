"""Writing what each rank has of some weights to their places in files of unsharded tensors.

A slice of rows is a *run*: consecutive bytes of its file. The rank that has it writes it, and its
checksum is taken on the way. A slice of columns is many short runs. To write these one by one is
slow on a disk: each takes pages of its own in the system's cache, which are allocated and flushed
separately. So ranks exchange tensors that are divided into runs shorter than `MIN_RUN_BYTES`:

1. Each tensor is cut into *blocks*, which are runs. Blocks are combined to *portions* of at most
   `PORTION_BYTES`, which are assigned to the ranks in turn.
2. In each step each rank sends the others what it has of their next portions. It assembles the
   blocks of its own, and writes them.

All ranks compute the same steps. A rank that fails takes part in the remaining ones, since others
wait for it; so memory for what a step sends and receives is allocated before the first one. For n
ranks, memory is three portions per rank if all have the same share of each, and n + 2 if one rank
has everything. So portions are smaller if there are many ranks.

The disk starts to write after every `_FLUSH_BYTES`, while ranks exchange and copy the next ones. So
the flush at the end has little left to wait for.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from dure.checkpoint.agreement import Ranks
from dure.checkpoint.files import PIECE_BYTES, pieces, start_flush, write_all
from dure.checkpoint.slice_files import Slice, TensorKind
from dure.checkpoint.slices import Box, full_box
from dure.comm.checksum import crc32c
from dure.comm.collectives import all_to_all
from dure.comm.reduction import as_bytes

__all__ = ["FilePosition", "Sums", "WeightWriter", "opened"]

MIN_RUN_BYTES = 1 << 20
PORTION_BYTES = 16 << 20
_STEP_BYTES = 64 << 20
"""The most that a rank sends in a step."""
_FLUSH_BYTES = 4 << 20
_MOST_OPEN = 64
_ALIGNMENT = 64

Sums = dict[str, dict[Box, int]]
"""CRC-32C of slices, by tensor."""


class FilePosition(NamedTuple):
    """The position of a tensor in a file."""

    path: Path
    begin: int


class _ExchangeStep(NamedTuple):
    """One exchange, as one rank sees it."""

    portions: list[list[Slice]]
    """The portion that each rank writes."""
    sent: list[int]
    """Bytes that this rank sends to each."""
    received: list[int]
    """Bytes that this rank receives from each."""


@contextmanager
def opened(path: Path, flags: int = 0) -> Iterator[int]:
    """Open a file for writing only: no host holds copies of pages that other hosts write."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class WeightWriter:
    """What one rank writes.

    Args:
        kinds: All tensors.
        parts: For each rank, the slices that it has to write; each element is in one.
        memory: Returns the elements of a slice of this rank.
        ranks: Those that save.
    """

    def __init__(
        self,
        kinds: Mapping[str, TensorKind],
        parts: Sequence[Iterable[Slice]],
        memory: Callable[[Slice], torch.Tensor],
        ranks: Ranks,
    ) -> None:
        self._kinds, self._memory, self._ranks = kinds, memory, ranks
        self._held: dict[str, dict[int, list[Box]]] = {name: {} for name in kinds}
        """The slices of all ranks, by tensor and rank."""
        for rank, slices in enumerate(parts):
            for part in slices:
                self._held[part.name].setdefault(rank, []).append(part.box)
        self.boxes: dict[str, list[Box]] = {}
        """The slices that have checksums, by tensor. Each is a run."""
        self.exchanged: list[str] = []
        """Tensors that ranks exchange."""
        for name, kind in kinds.items():
            full = full_box(kind.shape)
            boxes = [box for own in self._held[name].values() for box in own]
            if any(_has_short_runs(box, kind) for box in boxes):
                self.exchanged.append(name)
            else:
                self.boxes[name] = sorted(run for box in boxes for run in _runs(box, full))
        full_boxes = {name: full_box(kinds[name].shape) for name in self.exchanged}
        share = sum(kinds[name].num_bytes(box) for name, box in full_boxes.items()) // ranks.size
        self._most = max(PIECE_BYTES, min(PORTION_BYTES, _STEP_BYTES // ranks.size, share))
        for name, full in full_boxes.items():
            itemsize = kinds[name].torch_dtype.itemsize
            self.boxes[name] = list(_runs(full, full, self._most // itemsize))
        self._steps: list[_ExchangeStep] = []
        self._outgoing = self._incoming = torch.empty(0, dtype=torch.uint8, device="cpu")

    def write(self, targets: Mapping[str, list[FilePosition]]) -> Sums:
        """Write and flush the runs that this rank has; return their checksums.

        Raises:
            OSError: The disk is full, or a file cannot be written.
        """
        return self._write(self._own_runs(targets), targets)

    def reserve(self, targets: Mapping[str, list[FilePosition]]) -> None:
        """Compute the steps of `exchange`, and allocate what a step sends and receives.

        Raises:
            RuntimeError: There is not enough memory.
        """
        rank, size = self._ranks.rank, self._ranks.size
        portions = self._portions(targets)
        for begin in range(0, len(portions), size):
            step = portions[begin : begin + size]
            step += [[] for _ in range(size - len(step))]
            sent = [0 if w == rank else self._count(step[w], rank) for w in range(size)]
            received = [0 if r == rank else self._count(step[rank], r) for r in range(size)]
            self._steps.append(_ExchangeStep(step, sent, received))
        outgoing = max((_room(step.sent) for step in self._steps), default=0)
        incoming = max((_room(step.received) for step in self._steps), default=0)
        self._outgoing = torch.empty(outgoing, dtype=torch.uint8, device="cpu")
        self._incoming = torch.empty(incoming, dtype=torch.uint8, device="cpu")

    def exchange(self, targets: Mapping[str, list[FilePosition]]) -> Sums:
        """Exchange the other tensors, write and flush this rank's blocks; return their checksums.

        All ranks must have called `reserve` without an error.

        Raises:
            OSError: As `write`.

        Collective:
            All of the ranks.
        """
        blocks = self._own_blocks()
        try:
            return self._write(blocks, targets)
        except Exception:
            for _ in blocks:  # other ranks wait for what this one sends
                pass
            raise

    def _write(
        self, runs: Iterator[tuple[Slice, torch.Tensor]], targets: Mapping[str, list[FilePosition]]
    ) -> Sums:
        sums = Sums()
        with _Outputs() as outputs:
            for (name, box), memory in runs:
                kind = self._kinds[name]
                run, crc = box.run_in(full_box(kind.shape)), 0
                assert run is not None
                for number, target in enumerate(targets[name]):
                    at = target.begin + run[0] * kind.torch_dtype.itemsize
                    for data in pieces(memory):
                        crc = crc if number else crc32c(data, crc)
                        outputs.write(target.path, data, at)
                        at += len(data)
                sums.setdefault(name, {})[box] = crc
            outputs.flush()
        return sums

    def _own_runs(
        self, targets: Mapping[str, list[FilePosition]]
    ) -> Iterator[tuple[Slice, torch.Tensor]]:
        rank = self._ranks.rank
        mine = {name for name, held in self._held.items() if rank in held}
        for name in sorted(mine.difference(self.exchanged), key=targets.__getitem__):
            for box in sorted(self._held[name][rank]):
                memory = self._memory(Slice(name, box))
                for run in _runs(box, full_box(self._kinds[name].shape)):
                    yield Slice(name, run), memory[run.within(box)]

    def _own_blocks(self) -> Iterator[tuple[Slice, torch.Tensor]]:
        """Yield this rank's blocks. Each portion is a step that all ranks take.

        Raises:
            Exception: At the end, if this rank could not send or assemble something.
        """
        rank, size, failed = self._ranks.rank, self._ranks.size, None
        for step in self._steps:
            sent = _divided(self._outgoing, step.sent)
            received = _divided(self._incoming, step.received)
            try:
                for portion, memory in zip(step.portions, sent, strict=True):
                    if len(memory):
                        self._fill(memory, portion)
            except Exception as e:
                failed = e
            if size > 1:
                all_to_all(received, sent, self._ranks.group)
            begins = [0] * size
            for block in step.portions[rank]:
                if failed is None:
                    try:
                        block_memory = self._assembled(block, received, begins)
                    except Exception as e:
                        failed = e
                    else:
                        yield block, block_memory
        if failed is not None:
            raise failed

    def _portions(self, targets: Mapping[str, list[FilePosition]]) -> list[list[Slice]]:
        """Return the blocks of all exchanged tensors, in portions.

        They are ordered as in the files, but large elements come first, which keeps alignment.
        """
        itemsizes = {name: self._kinds[name].torch_dtype.itemsize for name in self.exchanged}
        portions, filled = list[list[Slice]](), self._most
        for name in sorted(itemsizes, key=lambda n: (-itemsizes[n], targets[n])):
            for box in self.boxes[name]:
                num_bytes = self._kinds[name].num_bytes(box)
                if filled + num_bytes > self._most:
                    portions.append([])
                    filled = 0
                portions[-1].append(Slice(name, box))
                filled += num_bytes
        return portions

    def _pieces(self, block: Slice, rank: int) -> Iterator[tuple[Box, Box]]:
        """Yield what a rank has of a block: its slice, and what both have."""
        for box in self._held[block.name].get(rank, ()):
            both = box.meet(block.box)
            if both is not None:
                yield box, both

    def _count(self, portion: list[Slice], rank: int) -> int:
        """Return the bytes that a rank has of a portion."""
        return sum(
            self._kinds[block.name].num_bytes(both)
            for block in portion
            for _, both in self._pieces(block, rank)
        )

    def _fill(self, memory: torch.Tensor, portion: list[Slice]) -> None:
        """Copy this rank's elements of a portion, as bytes."""
        at = 0
        for block in portion:
            for box, both in self._pieces(block, self._ranks.rank):
                part = self._memory(Slice(block.name, box))[both.within(box)]
                data = as_bytes(part.cpu().contiguous())
                memory[at : at + len(data)] = data
                at += len(data)

    def _assembled(
        self, block: Slice, received: list[torch.Tensor], begins: list[int]
    ) -> torch.Tensor:
        """Return a block.

        Args:
            block: The block.
            received: The other ranks' data of the portion.
            begins: Where this block begins in that, for each rank; set to where it ends.
        """
        dtype = self._kinds[block.name].torch_dtype
        block_memory = torch.empty(block.box.sizes, dtype=dtype, device="cpu")
        for rank in self._held[block.name]:
            for box, both in self._pieces(block, rank):
                if rank == self._ranks.rank:
                    piece = self._memory(Slice(block.name, box))[both.within(box)]
                else:
                    begin, count = begins[rank], both.num_elements * dtype.itemsize
                    piece = received[rank][begin : begin + count].view(dtype).view(both.sizes)
                    begins[rank] += count
                block_memory[both.within(block.box)] = piece
        return block_memory


class _Outputs:
    """Files that are written; few are open at once, and each is flushed before it is closed."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._unflushed: dict[Path, tuple[int, int]] = {}
        """Where the last consecutive bytes begin and end whose flush has not started."""
        self._stack = ExitStack()

    def __enter__(self) -> _Outputs:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._open.clear()

    def write(self, path: Path, data: memoryview, at: int) -> None:
        """Write bytes to a file, which is opened if it is not; OSError if that fails."""
        descriptor = self._descriptor(path)
        write_all(descriptor, data, at)
        begin, end = self._unflushed.get(path, (at, at))
        begin, end = (begin if end == at else at), at + len(data)
        if end - begin >= _FLUSH_BYTES:
            start_flush(descriptor, begin, end - begin)
            begin = end
        self._unflushed[path] = begin, end

    def _descriptor(self, path: Path) -> int:
        if path not in self._open:
            if len(self._open) == _MOST_OPEN:
                self.flush()
                self.__exit__()
            self._open[path] = self._stack.enter_context(opened(path))
        return self._open[path]

    def flush(self) -> None:
        """Flush all open files; OSError if that fails."""
        for descriptor in self._open.values():
            os.fsync(descriptor)


def _aligned(count: int) -> int:
    """Return at least `count` bytes, so that elements after them are aligned."""
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _room(counts: Sequence[int]) -> int:
    """Return the bytes that `_divided` needs."""
    return sum(_aligned(count) for count in counts)


def _divided(memory: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Return parts of memory that have these many bytes; each is aligned."""
    ends = itertools.accumulate(map(_aligned, counts), initial=0)
    return [memory[at : at + count] for at, count in zip(ends, counts, strict=False)]


def _first_divided(box: Box, within: Box) -> int:
    """Return the last dimension that `box` has only a part of; 0 if there is none.

    The indices of the dimensions before it each begin another run.
    """
    divided = (d for d, n in enumerate(box.sizes) if n != within.sizes[d])
    return max(divided, default=0)


def _has_short_runs(box: Box, kind: TensorKind) -> bool:
    full = full_box(kind.shape)
    if box.run_in(full) is not None:
        return False
    run = math.prod(box.sizes[_first_divided(box, full) :])
    return run * kind.torch_dtype.itemsize < MIN_RUN_BYTES


def _runs(box: Box, within: Box, most: int | None = None) -> Iterator[Box]:
    """Yield the runs of a box, in the order of their bytes.

    Args:
        box: A part of `within`.
        within: The runs are consecutive elements of it.
        most: The most elements of a run.
    """
    if not box.sizes or (box.run_in(within) is not None and (most or math.inf) >= box.num_elements):
        yield from [box] if box.num_elements else []
        return
    dim = _first_divided(box, within)
    while most is not None and math.prod(box.sizes[dim + 1 :]) > most:
        dim += 1
    count = box.sizes[dim]
    step = count if most is None else max(1, most // math.prod(box.sizes[dim + 1 :]))
    before = (range(a, a + n) for a, n in zip(box.offsets[:dim], box.sizes[:dim], strict=True))
    for indices in itertools.product(*before):
        for at in range(0, count, step):
            offsets = (*indices, box.offsets[dim] + at, *box.offsets[dim + 1 :])
            sizes = (*(1,) * dim, min(step, count - at), *box.sizes[dim + 1 :])
            yield Box(offsets, sizes)
