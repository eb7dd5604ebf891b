"""Saving a state dictionary: each rank writes its slices, rank 0 the manifest.

1. Rank 0 makes the folder; all report their slices (or that these are unchanged), and their trees.
   A save in the background holds copies from here on, and makes the folder later.
2. Each writes its file, through to the disk; all report the outcome, and the slices' checksums.
3. Rank 0 puts the manifest in its place; all learn that it is written.

A failure on any rank fails on all, before anything of the folder's checkpoint is touched.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from traceback import StackSummary
from typing import Any

import torch

from dure.checkpoint.agreement import Ranks
from dure.checkpoint.catalog import (
    NAME,
    Catalog,
    Stored,
    clear,
    leaves_of,
    next_number,
    not_shared,
    part_name,
    publish,
    remove,
)
from dure.checkpoint.files import can_be_named
from dure.checkpoint.folder import Folder, Unflushed, make
from dure.checkpoint.lock import sees_lock
from dure.checkpoint.objects import few, own_state
from dure.checkpoint.planning import Division, Known, Offer, digest_of, known_to, marked_of
from dure.checkpoint.replicas import (
    ReplicaRule,
    TreeDifference,
    handling,
    marks_of,
    require_common,
    rule_of,
)
from dure.checkpoint.slice_files import FileLayout, Slice, TensorKind, kind_of, write_slices
from dure.checkpoint.slices import Box, pieces_of
from dure.checkpoint.tree import (
    ABSENT,
    Keys,
    Named,
    encode_state,
    flatten,
    merged,
    names_in,
    without_marks,
)
from dure.errors import (
    CheckpointError,
    CheckpointException,
    CheckpointMismatch,
    CheckpointNotWritten,
    UsageError,
)
from dure.trace import logs

__all__ = ["OnDemand", "Saving", "Taken", "begin", "save_into", "take"]

_NO_RULE = ReplicaRule()
_NOT_SAVED = "the checkpoint was not saved"
_log = logs.logger("checkpoint")
_SHOWN = 8
"""Ranks of which the log says what they wrote."""


class OnDemand(dict[Slice, torch.Tensor]):
    """Tensors that are made when they are written, and not kept."""

    def __init__(self, make: Callable[[Slice], torch.Tensor]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, part: Slice) -> torch.Tensor:
        return self._make(part)


@dataclass(frozen=True, slots=True)
class Taken:
    """What one rank has to save. The tensors are those of the program, not copies."""

    offer: Offer
    memory: dict[Slice, torch.Tensor]
    tree: Any
    rules: dict[str, ReplicaRule] = field(default_factory=dict[str, ReplicaRule])
    """What other ranks must have in common with this one, by key of the state."""


@dataclass(frozen=True, slots=True)
class _RankState:
    """What a rank sends to the others before writing."""

    digest: bytes
    offer: Offer | None
    marks: bytes
    has_empty: bool
    """Whether there is a tensor of which this rank has no elements."""
    rules: dict[str, ReplicaRule]
    tree: Any
    tree_digest: bytes
    """Equal for equal trees: to compare the trees of n ranks would be n * n / 2 comparisons."""
    begun: Any
    """What `before` returned."""


def take(
    state_dict: Mapping[str, Any],
    ranks: frozenset[int],
    rules: dict[str, ReplicaRule] | None = None,
) -> Taken:
    """Take a state apart into slices and a tree. No communication.

    Args:
        state_dict: The state, or objects that have one.
        ranks: The global ranks that save.
        rules: Requirements of ranks, by key; None: as `rule_of` the objects.

    Raises:
        UsageError: Something in it cannot be saved; the message has its name.
    """
    state = {key: own_state(value) for key, value in state_dict.items()}
    if rules is None:
        rules = {str(key): rule_of(key, value, state[key]) for key, value in state_dict.items()}
    for name in flatten(state):
        if not can_be_named(name):
            raise UsageError("nothing can be saved under this name", seen=f"{name!a}")
    tensors: dict[str, torch.Tensor] = {}

    def may_differ(key: Any, name: str) -> bool:
        # A buffer may be saved with another rank's values, so entries of this rank alone that are
        # the same tensor are stored separately.
        return len(ranks) > 1 and rules.get(str(key), _NO_RULE).exempts(name)

    tree, key_of = encode_state(state, tensors, may_differ)
    taken = Taken({}, {}, tree, rules)
    is_everywhere: dict[int, bool] = {}
    for name, tensor in tensors.items():
        pieces, kind = pieces_of(name, tensor), kind_of(tensor)
        if kind is None:
            raise UsageError("a tensor cannot be in a checkpoint", seen=f"{name} is {tensor.dtype}")
        rule = rules.get(str(key_of[name]), _NO_RULE)
        how = handling(name, tensor, rule, ranks, is_everywhere)
        taken.offer[name] = kind, tuple(piece.box for piece in pieces), how
        for piece in pieces:
            taken.memory[Slice(name, piece.box)] = piece.memory.resolve_conj().resolve_neg()
    return taken


def _noted(found: list[TreeDifference], rank: int, keys: Keys, first: Any, second: Any) -> None:
    found.append(TreeDifference(rank, keys, first, second))


def _changed(tree: dict[str, Any], keys: set[str]) -> dict[str, Any]:
    """Return the part of a merged tree in which two entries may have the same name.

    Args:
        tree: The merged tree. Within the tree of one rank, names are unique.
        keys: The keys at which the trees of ranks differ.
    """
    if "$" in tree:
        return tree
    below = tuple(f"{key}." for key in keys)
    return {
        key: node
        for key, node in tree.items()
        if key in keys or key.startswith(below) or any(k.startswith(f"{key}.") for k in keys)
    }


class Saving:
    """One save of one rank.

    Args:
        ranks: Those that save.
        state_dict: Their state; or the result of `take` for it, or a function that returns that.
        before: Called first; if it raises on one rank, all ranks fail.

    Raises:
        CheckpointException: It failed on some ranks; nothing was written.
        UsageError: The backend is `fake`.

    Collective: all of `ranks`. One exchange.
    """

    def __init__(
        self,
        ranks: Ranks,
        state_dict: Mapping[str, Any] | Taken | Callable[[], Taken],
        before: Callable[[], Any] = lambda: None,
    ) -> None:
        ranks.require_others()
        self._ranks, known = ranks, known_to(ranks.group)
        mine: list[Taken] = []

        def prepare() -> _RankState:
            begun = before()
            if isinstance(state_dict, Taken):
                mine.append(state_dict)
            elif isinstance(state_dict, Mapping):
                mine.append(take(state_dict, ranks.global_ranks))
            else:
                mine.append(state_dict())
            taken, digest = mine[0], digest_of(mine[0].offer)
            offer = None if known.has(ranks.rank, digest) else taken.offer
            marks = marks_of([taken.memory[part] for part in marked_of(taken.offer)])
            has_empty = not all(boxes for _, boxes, _ in taken.offer.values())
            text = json.dumps(taken.tree).encode()
            tree = taken.tree, hashlib.blake2b(text, digest_size=16).digest()
            return _RankState(digest, offer, marks, has_empty, taken.rules, *tree, begun)

        self._sent = ranks.all_or_none(_NOT_SAVED, prepare)
        self._memory = mine[0].memory
        self._division: Division | CheckpointMismatch | UsageError
        try:  # what is wrong is so on all ranks
            self._division = self._agree(known)
        except (CheckpointMismatch, UsageError) as e:
            self._division = e.with_traceback(None)

    def _agree(self, known: Known) -> Division:
        """Compare what ranks sent, merge their trees, and divide what they have.

        Raises:
            CheckpointMismatch: They do not fit together.
            UsageError: Two entries have the same name.
        """
        sent, differences = self._sent, list[TreeDifference]()
        trees, digests = [sent[0].tree], {sent[0].tree_digest}
        self._tree = sent[0].tree
        for rank, one in enumerate(sent):
            if one.tree_digest not in digests:
                digests.add(one.tree_digest)
                trees.append(one.tree)
                self._tree = merged(self._tree, one.tree, partial(_noted, differences, rank))
        values = require_common(differences, [one.rules for one in sent])
        unused = frozenset[str]()
        if len(trees) > 1:
            has_empty = any(one.has_empty for one in sent)
            if has_empty or any(names_in([v.first, v.second]) for v in values):
                self._tree = without_marks(self._tree)
                unused = names_in(trees) - names_in(self._tree)
            leaves_of(_changed(self._tree, {found.keys[0] for found in differences}))
        offers = [(one.digest, one.offer) for one in sent]
        division, slices = known.division(offers, [one.marks for one in sent], unused)
        self._require_own({part.name for part in slices}, differences)
        if self._ranks.rank == 0:
            names = dict.fromkeys([v.name for v in values] + sorted(p.name for p in slices))
            new = [name for name in names if name not in known.reported]
            known.reported.update(new)
            if new:
                _log.warning(
                    "ranks have different values of %s; the lowest rank's are saved", few(new)
                )
        return division

    def _require_own(self, names: set[str], differences: list[TreeDifference]) -> None:
        """Refuse entries of one rank alone that are tensors saved with another rank's values.

        Args:
            names: Of tensors that have different values on different ranks.
            differences: Between the trees.
        """
        for found in differences if names else ():
            own = names_in(found.second) & names if found.first is ABSENT else frozenset[str]()
            for name in own & names_in([one.tree for one in self._sent[: found.rank]]):
                raise CheckpointMismatch(
                    "an entry of one rank would be saved with another rank's values",
                    seen=f"{found.name} of rank {found.rank} is the tensor {name}, which differs "
                    "between ranks",
                    fix="Save a clone() of it.",
                )

    def _divided(self) -> Division:
        if isinstance(self._division, Division):
            return self._division
        raise copy(self._division)  # whose traceback refers to this object

    def hold(self, stage: Callable[[dict[Slice, torch.Tensor]], dict[Slice, torch.Tensor]]) -> None:
        """Keep copies of what this rank writes: the program may change its tensors from now on.

        Raises:
            CheckpointException: It failed on some ranks.

        Collective: all of the ranks. One exchange.
        """

        def held() -> None:
            self._memory = stage(self.mine())

        self._ranks.all_or_none(_NOT_SAVED, held)

    def write(self, folder: Folder, path: Path, number: int) -> Catalog:
        """Write into the folder `path`, as its `number`-th save; return the manifest.

        On rank 0 `folder` holds the lock: `path`, or the folder above it.

        Raises:
            CheckpointException: It failed on some ranks; earlier checkpoints are unchanged. If the
                failure is an `Unflushed`, the new checkpoint is in place.

        Collective: all of the ranks. Two exchanges.
        """
        ranks, wrote = self._ranks, False

        def write() -> list[int]:
            nonlocal wrote
            if ranks.rank != 0 and not sees_lock(path):
                seen = f"rank {ranks.rank} does not see the lock that rank 0 holds there"
                raise not_shared(path, seen)
            layout = self._divided().layouts[ranks.rank]
            if not layout.begins:
                return []
            wrote = True
            try:
                return write_slices(path / part_name(number, ranks.rank), layout, self._memory)
            except (FileNotFoundError, FileExistsError) as e:
                wrote = False
                if ranks.rank == 0:
                    raise
                seen = f"rank 0 made the folder, and rank {ranks.rank} got: {e.strerror}"
                raise not_shared(path, seen) from e

        def publish_on_rank_0() -> Unflushed | None:
            if ranks.rank != 0:
                return None
            return publish(path, catalog, folder.check)

        def clean_up(error: BaseException) -> None:
            """Remove what was written: on rank 0 all files, and then another job may save there.

            Another rank may come here late, when a file of its name is one of the next save, which
            may have this number. So it removes its file only if rank 0 may not see that.
            """
            failures = error.failures.values() if isinstance(error, CheckpointException) else ()
            with suppress(OSError):
                if ranks.rank == 0:
                    folder.check()  # if another job has taken over, these are its files
                    remove(path, number=number)
                elif wrote and any(isinstance(e, CheckpointNotWritten) for e, _ in failures):
                    remove(path, number=number, rank=ranks.rank)

        try:
            sums = ranks.all_or_none(_NOT_SAVED, write)
        except BaseException as e:
            clean_up(e)
            raise
        catalog = self._catalog(sums, number)
        try:
            unflushed = ranks.all_or_none(_NOT_SAVED, publish_on_rank_0)[0]
        except CheckpointException as e:  # rank 0 has not published; else that is unknown
            clean_up(e)
            raise
        try:
            if unflushed is not None:
                raise CheckpointException(
                    "the checkpoint is in place and complete, but it may not be durable",
                    {0: (unflushed, StackSummary())},
                    fix="Check the disk and save again. Until then a power failure may bring back "
                    "the previous checkpoint, whose files are kept.",
                ) from unflushed
            self._report(path)
            return catalog
        finally:
            del unflushed  # see `Ranks._outcomes`

    @logs.never_fails
    def _report(self, path: Path) -> None:
        """Write one line about who wrote what."""
        ranks = self._ranks
        if logs.reports(_log, ranks.rank):
            layouts = self._divided().layouts
            parts = [
                f"rank {rank}: {logs.size_text(layout.num_bytes)}"
                for rank, layout in enumerate(layouts)
                if layout.begins
            ]
            logs.decided(
                _log,
                ranks.rank,
                "checkpoint %s: saved by %d of %d ranks (%s)",
                *(path, len(parts), ranks.size, ", ".join(parts[:_SHOWN])),
            )

    def _catalog(self, sums: list[list[int]], number: int) -> Catalog:
        """Combine what ranks sent with the checksums of what they wrote."""
        division = self._divided()
        slices: dict[str, dict[Box, Stored]] = {name: {} for name in division.kinds}
        layouts: dict[str, FileLayout] = {}
        for rank, (layout, crcs) in enumerate(zip(division.layouts, sums, strict=True)):
            if crcs:
                file = part_name(number, rank)
                layouts[file] = layout
                for part, crc in zip(layout.begins, crcs, strict=True):
                    slices[part.name][part.box] = Stored(file, crc)
        return Catalog(self._tree, division.kinds, slices, layouts)

    def kinds(self) -> dict[str, TensorKind]:
        """Return what is saved by all ranks; CheckpointMismatch if it does not fit together."""
        return self._divided().kinds

    def mine(self) -> dict[Slice, torch.Tensor]:
        """Return what this rank is to write; errors as `kinds`."""
        begins = self._divided().layouts[self._ranks.rank].begins
        return {part: self._memory[part] for part in begins}

    def layouts(self) -> list[FileLayout]:
        """Return which slices each rank is to write; errors as `kinds`."""
        return self._divided().layouts

    def memory(self, part: Slice) -> torch.Tensor:
        """Return the elements of a slice that this rank has."""
        return self._memory[part]

    def names(self) -> dict[str, str | None]:
        """Return for each name of the state the name of its tensor, or None for a value.

        Tied weights have the same tensor. Errors as `kinds`.
        """
        self._divided()
        leaves = leaves_of(self._tree).items()
        return {n: leaf.value if isinstance(leaf.value, Named) else None for n, leaf in leaves}

    @property
    def begun(self) -> Any:
        """What `before` returned on rank 0."""
        return self._sent[0].begun


def begin(folder: Folder, replace: bool) -> int:
    """Make a folder, keep others from saving there, and return the number of a new save.

    What a killed save left there is removed.

    Raises:
        OSError: It cannot be made, or another job saves there.
        CheckpointError: There is a checkpoint, and it is not to be replaced.
    """
    path = folder.path
    make(path)
    folder.hold()
    if not replace and (path / NAME).exists():
        raise CheckpointError(
            "there is a checkpoint already",
            path=str(path),
            seen=f"{path}",
            fix="Save into another folder, or pass overwrite=True.",
        )
    number = next_number(path)
    clear(path)
    return number


def save_into(
    path: Path, state_dict: Mapping[str, Any] | Taken, ranks: Ranks, replace: bool = True
) -> Catalog:
    """Save a state into the folder `path`; with `replace` an existing checkpoint is replaced.

    Returns its manifest.

    Raises:
        CheckpointException: It failed on some ranks; earlier checkpoints are unchanged.

    Collective: all of `ranks`. Three exchanges.
    """
    folder = Folder(path)
    try:
        saving = Saving(
            ranks, state_dict, lambda: begin(folder, replace) if ranks.rank == 0 else None
        )
        return saving.write(folder, path, saving.begun)
    finally:
        folder.release()
