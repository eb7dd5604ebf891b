"""Saving a state dictionary: each rank writes its slices, rank 0 the manifest.

1. Rank 0 makes the folder; all report digests of their slices and their trees, with these if they
   are short. Rank 0 compares and divides what all have, and each learns what it writes
   (`planning`). A save in the background holds copies from here on, and makes the folder later.
2. Only if rank 0 does not have all of them, neither from this save nor from those before: it asks
   for what it lacks in the answer to 1, and divides then.
3. Each writes its file, through to the disk, and sends rank 0 its length and header's checksum.
   Rank 0 puts the manifest in its place; all learn that it is written.

A failure on any rank fails on all, before anything of the folder's checkpoint is touched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import partial
from traceback import StackSummary
from typing import Any, NamedTuple

import numpy as np
import torch

from dure.checkpoint.agreement import Ranks
from dure.checkpoint.catalog import (
    NAME,
    Manifest,
    Published,
    clear,
    clear_save,
    next_number,
    not_shared,
    part_name,
    publish,
    remove,
)
from dure.checkpoint.contents import leaves_of
from dure.checkpoint.file_systems import file_system_of
from dure.checkpoint.files import can_be_named
from dure.checkpoint.folder import Folder
from dure.checkpoint.fsspec_path import AnyPath
from dure.checkpoint.lock import sees_lock
from dure.checkpoint.objects import few, own_state
from dure.checkpoint.planning import (
    Description,
    Division,
    Known,
    Offer,
    described,
    digest_of,
    known_to,
    marked_of,
    parts_of,
)
from dure.checkpoint.replicas import (
    ReplicaRule,
    TreeDifference,
    handling,
    marks_of,
    require_common,
    rule_of,
)
from dure.checkpoint.slice_files import (
    FileLayout,
    FileRecord,
    Slice,
    TensorKind,
    file_id,
    kind_of,
    new_save_id,
    write_slices,
)
from dure.checkpoint.slices import pieces_of
from dure.checkpoint.tree import (
    ABSENT,
    Keys,
    Named,
    encode_state,
    flatten,
    merged,
    names_in,
    put,
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
_MOST_EARLY_BYTES = 1 << 20
"""Of what all ranks send together before rank 0 has asked for it."""
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
    own: tuple[Keys, Any] | None = None
    """A node of the state's tree that is this rank's alone, and where it is; `tree` lacks it."""


class _Summary(NamedTuple):
    """Digests of what a rank has."""

    keys: tuple[bytes, bytes]
    """Digests of its description."""
    tree: bytes
    """A digest: to compare the trees of n ranks would be n * n / 2 comparisons."""
    rules: bytes
    """A digest."""
    marks: bytes
    has_empty: bool
    """Whether there is a tensor of which this rank has no elements."""


class _Wanted(NamedTuple):
    """What rank 0 does not have of a rank."""

    skeleton: bool
    boxes: bool
    tree: bool
    rules: bool


class _Sent(NamedTuple):
    """What a rank sends of what rank 0 does not have."""

    description: Description
    tree: Any
    rules: dict[str, ReplicaRule] | None

    def only(self, wanted: _Wanted) -> _Sent:
        """Return what is wanted of it."""
        skeleton, boxes = self.description
        description = Description(skeleton * wanted.skeleton, boxes * wanted.boxes)
        tree, rules = self.tree if wanted.tree else None, self.rules if wanted.rules else None
        return _Sent(description, tree, rules)


class _First(NamedTuple):
    """What a rank sends to rank 0 first."""

    summary: _Summary
    own: tuple[Keys, Any] | None
    """As in `Taken`."""
    early: _Sent | None
    """What rank 0 may not have, if it is short."""
    begun: Any
    """What `before` of `Saving` returned."""


class _Shared(NamedTuple):
    """What all ranks save."""

    kinds: dict[str, TensorKind]
    parts: list[list[Slice]]
    """Which slices each rank writes."""
    names: Mapping[str, str | None]
    """For each name of the state the name of its tensor, or None for a value."""


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


_NOTHING = _Sent(Description(b"", b""), None, None)


def _first(taken: Taken, begun: Any, most_bytes: int) -> tuple[_First, _Sent]:
    """Return what a rank sends first, and all that rank 0 may ask for.

    Args:
        taken: The state of this rank.
        begun: What `before` returned.
        most_bytes: Up to this length, all is sent at once.
    """
    description, tree = described(taken.offer), json.dumps(taken.tree).encode()
    rules = repr(_in_order(taken.rules)).encode()
    skeleton, boxes = map(digest_of, description)
    marks = marks_of([taken.memory[part] for part in marked_of(taken.offer)])
    has_empty = not all(boxes for _, boxes, _ in taken.offer.values())
    summary = _Summary((skeleton, boxes), digest_of(tree), digest_of(rules), marks, has_empty)
    every = _Sent(description, taken.tree, taken.rules)
    is_short = sum(map(len, description)) + len(tree) + len(rules) <= most_bytes
    return _First(summary, taken.own, every if is_short else None, begun), every


class Saving:
    """One save of one rank.

    Args:
        ranks: Those that save.
        state_dict: Their state; or the result of `take` for it, or a function that returns that.
        before: Called first; if it raises on one rank, all ranks fail.

    Raises:
        CheckpointException: It failed on some ranks; nothing was written.
        UsageError: The backend is `fake`.

    Collective:
        All of `ranks`. One exchange; two if rank 0 does not have what they have, and it is not
        short.
    """

    def __init__(
        self,
        ranks: Ranks,
        state_dict: Mapping[str, Any] | Taken | Callable[[], Taken],
        before: Callable[[], Any] = lambda: None,
    ) -> None:
        ranks.require_others()
        self._ranks = ranks
        mine: list[tuple[Taken, _Sent]] = []
        self._division: Division | None = None
        self._summaries: list[_Summary] = []
        self._owns: list[tuple[Keys, Any] | None] = []
        """All on rank 0."""

        def prepare() -> _First:
            begun = before()
            if isinstance(state_dict, Taken):
                taken = state_dict
            elif isinstance(state_dict, Mapping):
                taken = take(state_dict, ranks.global_ranks)
            else:
                taken = state_dict()
            first, every = _first(taken, begun, _MOST_EARLY_BYTES // ranks.size)
            mine.append((taken, every))
            return first

        def ask(firsts: list[_First]) -> list[tuple[_Wanted | None, tuple[Any, str], Any]]:
            known, begun = known_to(ranks.group), (firsts[0].begun, new_save_id())
            self._summaries, self._owns = [f.summary for f in firsts], [f.own for f in firsts]
            wanted = self._wanted(known)
            early = [mine[0][1], *(first.early for first in firsts[1:])]
            if any(any(w) and e is None for w, e in zip(wanted, early, strict=True)):
                return [(one, begun, None) for one in wanted]
            sent = [(e or _NOTHING).only(w) for e, w in zip(early, wanted, strict=True)]
            return [(None, begun, answer) for answer in self._divide(known, sent)]

        wanted, (self.begun, self._id), answer = ranks.decided(_NOT_SAVED, prepare, ask, apart=True)
        """`begun`: what `before` returned on rank 0."""
        taken, every = mine[0]
        if wanted is not None:
            answer = ranks.decided(
                _NOT_SAVED,
                lambda: every.only(wanted),
                lambda sent: self._divide(known_to(ranks.group), sent),
                apart=True,
            )
        self._memory, self._fault, self._shared = taken.memory, None, None
        self._kinds = {name: kind for name, (kind, _, _) in taken.offer.items()}
        self._parts: list[Slice] = []
        """The slices that this rank writes, in the order of its file."""
        if isinstance(answer, Exception):
            self._fault = answer
            return
        parts = parts_of(taken.offer)
        found = [parts[position] for position in answer.tolist()]
        self._layout = FileLayout.summed(found, self._kinds)
        self._parts = list(self._layout.begins)

    def _divide(self, known: Known, sent: list[_Sent]) -> list[Any]:
        """Return for each rank the positions that it writes; or the error for all of them."""
        try:
            self._division = self._agree(known, sent)
        except (CheckpointMismatch, UsageError) as e:
            return [e.with_traceback(None)] * self._ranks.size
        return [positions.astype(np.int32) for positions in self._division.positions]

    def _wanted(self, known: Known) -> list[_Wanted]:
        """Return what each rank must send: of equal things, the lowest rank's are enough."""
        lacks = known.lacks([one.keys for one in self._summaries])
        trees, rules = set[bytes](), set[bytes]()
        found: list[_Wanted] = []
        for one, (skeleton, boxes) in zip(self._summaries, lacks, strict=True):
            found.append(_Wanted(skeleton, boxes, one.tree not in trees, one.rules not in rules))
            trees.add(one.tree)
            rules.add(one.rules)
        return found

    def _agree(self, known: Known, sent: list[_Sent]) -> Division:
        """Compare what ranks sent, merge their trees, and divide what they have. On rank 0.

        Raises:
            CheckpointMismatch: They do not fit together.
            UsageError: Two entries have the same name.
        """
        summaries, differences = self._summaries, list[TreeDifference]()
        self._trees = {rank: one.tree for rank, one in enumerate(sent) if one.tree is not None}
        self._tree = self._trees[0]
        for rank, tree in self._trees.items():
            self._tree = merged(self._tree, tree, partial(_noted, differences, rank))
        has_own = False
        for rank, own in enumerate(self._owns):
            if own is not None:
                keys, node = own
                if not has_own:  # the tree of rank 0, whose nodes these are, stays as it is
                    self._tree = {**self._tree, keys[0]: deepcopy(self._tree[keys[0]])}
                has_own = True
                put(self._tree, keys, node)
                if rank:
                    differences.append(TreeDifference(rank, keys, ABSENT, node))
        values = require_common(differences, [one.rules for one in sent if one.rules is not None])
        unused = frozenset[str]()
        if len(self._trees) > 1 or has_own:
            has_empty = any(one.has_empty for one in summaries)
            if has_empty or any(names_in([v.first, v.second]) for v in values):
                self._tree = without_marks(self._tree)
                unused = names_in(list(self._trees.values())) - names_in(self._tree)
            leaves_of(_changed(self._tree, {found.keys[0] for found in differences}))
        division, slices = known.division(
            [one.keys for one in summaries],
            [one.description for one in sent],
            [one.marks for one in summaries],
            unused,
        )
        self._require_own({part.name for part in slices}, differences)
        names = dict.fromkeys([v.name for v in values] + sorted(p.name for p in slices))
        new = [name for name in names if name not in known.reported]
        known.reported.update(new)
        if new:
            _log.warning("ranks have different values of %s; the lowest rank's are saved", few(new))
        return division

    def _require_own(self, names: set[str], differences: list[TreeDifference]) -> None:
        """Refuse entries of one rank alone that are tensors saved with another rank's values.

        Args:
            names: Of tensors that have different values on different ranks.
            differences: Between the trees.
        """
        for found in differences if names else ():
            own = names_in(found.second) & names if found.first is ABSENT else frozenset[str]()
            for name in own & names_in([t for rank, t in self._trees.items() if rank < found.rank]):
                raise CheckpointMismatch(
                    "an entry of one rank would be saved with another rank's values",
                    seen=f"{found.name} of rank {found.rank} is the tensor {name}, which differs "
                    "between ranks",
                    fix="Save a clone() of it.",
                )

    def _require_divided(self) -> None:
        if self._fault is not None:
            raise copy(self._fault)  # whose traceback refers to this object

    def hold(self, stage: Callable[[dict[Slice, torch.Tensor]], dict[Slice, torch.Tensor]]) -> None:
        """Keep copies of what this rank writes: the program may change its tensors from now on.

        Raises:
            CheckpointException: It failed on some ranks.

        Collective:
            All of the ranks. One exchange.
        """

        def held() -> None:
            self._memory = stage(self.mine())

        self._ranks.decided(_NOT_SAVED, held)

    def write(self, folder: Folder, path: AnyPath, number: int) -> bytes:
        """Write into the folder `path`, as its `number`-th save; return the manifest's digest.

        On rank 0 `folder` holds the lock: `path`, or the folder above it.

        Raises:
            CheckpointException: It failed on some ranks; earlier checkpoints are unchanged. If the
                failure is an `Unflushed`, the new checkpoint is in place.

        Collective:
            All of the ranks. One exchange.
        """
        ranks, wrote, publishing = self._ranks, False, False
        is_new = path != folder.path  # this save has made it, below the folder with the lock
        written: dict[int, FileRecord] = {}

        def write() -> FileRecord | None:
            nonlocal wrote
            if ranks.rank != 0 and not sees_lock(path.parent if is_new else path, path):
                seen = f"rank {ranks.rank} does not see the lock that rank 0 holds there"
                raise not_shared(path, seen)
            self._require_divided()
            if not self._parts:
                return None
            wrote = True
            try:
                file = path / part_name(number, ranks.rank)
                return write_slices(file, self._layout, self._memory, file_id(self._id, ranks.rank))
            except (FileNotFoundError, FileExistsError) as e:
                wrote = False
                if ranks.rank == 0:
                    raise
                seen = f"rank 0 made the folder, and rank {ranks.rank} got: {e.strerror}"
                raise not_shared(path, seen) from e

        def publish_on_rank_0(records: list[FileRecord | None]) -> Published:
            nonlocal publishing
            publishing = True
            written.update({r: record for r, record in enumerate(records) if record is not None})
            assert self._division is not None
            manifest = Manifest(self._tree, number, self._id, written, self._division.text)
            return publish(path, manifest, folder.check, is_new)

        try:
            digest, unflushed = ranks.decided(_NOT_SAVED, write, publish_on_rank_0)
        except BaseException as e:
            if isinstance(e, CheckpointException) or not publishing:  # else it may be in place
                self._clean_up(e, folder, path, number, wrote)
            raise
        try:
            if unflushed is not None:
                raise CheckpointException(
                    "the checkpoint is in place and complete, but it may not be durable",
                    {0: (unflushed, StackSummary())},
                    fix="Check the disk and save again. Until then a power failure may bring back "
                    "the previous checkpoint, whose files are kept.",
                ) from unflushed
            if ranks.rank == 0:
                self._report(path, written)
            return digest
        finally:
            del unflushed  # see `Ranks.decided`

    def _clean_up(
        self, error: BaseException, folder: Folder, path: AnyPath, number: int, wrote: bool
    ) -> None:
        """Remove what was written: on rank 0 of all ranks, and then another job may save there.

        Another rank may come here late, when a file of its name is one of the next save, which
        may have this number. So it removes its file only if rank 0 may not see that.
        """
        ranks = self._ranks
        failures = error.failures.values() if isinstance(error, CheckpointException) else ()
        with suppress(OSError):
            if ranks.rank == 0:
                folder.check()  # if another job has taken over, these are its files
                clear_save(path, number)
            elif wrote and any(isinstance(e, CheckpointNotWritten) for e, _ in failures):
                remove(path, number=number, rank=ranks.rank)

    @logs.never_fails
    def _report(self, path: AnyPath, written: dict[int, FileRecord]) -> None:
        """Write one line about who wrote what."""
        if logs.reports(_log, 0):
            parts = [
                f"rank {rank}: {logs.size_text(record.num_bytes)}"
                for rank, record in written.items()
            ]
            logs.decided(
                _log,
                0,
                "checkpoint %s: saved by %d of %d ranks (%s)",
                *(path, len(parts), self._ranks.size, ", ".join(parts[:_SHOWN])),
            )

    def mine(self) -> dict[Slice, torch.Tensor]:
        """Return what this rank is to write; CheckpointMismatch if it does not fit together."""
        self._require_divided()
        return {part: self._memory[part] for part in self._parts}

    def share(self) -> None:
        """Let all ranks know what all save, for files that they write together.

        Collective:
            All of the ranks. One exchange.

        Cost:
            Each rank receives what all ranks save.
        """

        def share() -> _Shared:
            assert self._division is not None
            leaves = leaves_of(self._tree).items()
            tensors = {
                n: leaf.value if isinstance(leaf.value, Named) else None for n, leaf in leaves
            }
            return _Shared(self._division.kinds, self._division.parts(), tensors)

        ranks = self._ranks
        self._shared = ranks.decided(_NOT_SAVED, self._require_divided, lambda _: share())

    def _of_all(self) -> _Shared:
        assert self._shared is not None, "share() comes first"
        return self._shared

    def kinds(self) -> dict[str, TensorKind]:
        """Return what is saved by all ranks."""
        return self._of_all().kinds

    def parts(self) -> list[list[Slice]]:
        """Return which slices each rank is to write."""
        return self._of_all().parts

    def memory(self, part: Slice) -> torch.Tensor:
        """Return the elements of a slice that this rank has."""
        return self._memory[part]

    def names(self) -> Mapping[str, str | None]:
        """Return for each name of the state the name of its tensor, or None for a value.

        Tied weights have the same tensor.
        """
        return self._of_all().names


def _in_order(rules: dict[str, ReplicaRule]) -> list[Any]:
    return [(k, r.keys, r.values, r.lowest, sorted(r.free)) for k, r in sorted(rules.items())]


def begin(folder: Folder, replace: bool) -> int:
    """Make a folder, keep others from saving there, and return the number of a new save.

    What a killed save left there is removed.

    Raises:
        OSError: It cannot be made, or another job saves there.
        CheckpointError: There is a checkpoint, and it is not to be replaced.
    """
    path = folder.path
    file_system_of(path).make(path)
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
    path: AnyPath, state_dict: Mapping[str, Any] | Taken, ranks: Ranks, replace: bool = True
) -> bytes:
    """Save a state into the folder `path`; with `replace` an existing checkpoint is replaced.

    Returns the digest of its manifest.

    Raises:
        CheckpointException: It failed on some ranks; earlier checkpoints are unchanged.

    Collective:
        All of `ranks`. Two exchanges, or three (`Saving`).
    """
    folder = Folder(path)
    try:
        saving = Saving(
            ranks, state_dict, lambda: begin(folder, replace) if ranks.rank == 0 else None
        )
        return saving.write(folder, path, saving.begun)
    finally:
        folder.release()
