"""One checkpoint of a run, as one rank sees it: checks, comparison, and putting its state back.

It is a checkpoint as `save` makes them, of the objects by name. Other state of a run is under
separate of its own: the step, and for each rank the state of its generators and its `PerRank`
    objects.

    {"model": ..., "optimizer": ..., "(run)": {"step": 3000, "ranks": {"0": {"(random)": ...}}}}

A loader's state is rank 0's. In case ranks are not in step, "(positions)" has each rank's own.

Ranks share out the checking: each slice is read and compared with its checksum by one of them.
Loading is every rank's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dure.checkpoint.agreement import Ranks
from dure.checkpoint.catalog import catalog_of, unless_changed
from dure.checkpoint.files import damaged
from dure.checkpoint.folder import Place
from dure.checkpoint.objects import PerRank, Positioned, bare, check_fits, is_divided, load_into
from dure.checkpoint.randomness import restore_random_state, seed_new_rank
from dure.checkpoint.reading import Mapped
from dure.checkpoint.restoring import in_order, load_from
from dure.checkpoint.tree import decode
from dure.errors import CheckpointException, CheckpointMismatch

__all__ = ["POSITIONS", "RANDOM", "RUN", "Resuming"]

RANDOM, RUN, POSITIONS = "(random)", "(run)", "(positions)"
"""Names that are no objects: the generators' state of a rank, all else of a run, loaders' positions
of a rank."""


class Resuming:
    """A checkpoint of a run.

    Args:
        place: Its path.
        ranks: The ranks that read it. Each checks its share of the bytes.

    Raises:
        CheckpointDamaged: It is damaged; `seen` says what is wrong.
        CheckpointError: It cannot be read, or was removed while it was read.
    """

    def __init__(self, place: Place, ranks: Ranks) -> None:
        self.path, self._rank, self._num_ranks = place.path, ranks.rank, ranks.size
        self.catalog = catalog_of(place.path)
        try:
            run = self.catalog.tree[RUN]
            self.step: int = run["step"]
            self._ranks = [run["ranks"][str(rank)] for rank in range(len(run["ranks"]))]
            self._random = [own[RANDOM] for own in self._ranks]
        except (LookupError, TypeError):
            raise damaged(self.path, "its manifest is not that of a run") from None
        if self.step != place.step or not self._ranks:
            raise damaged(self.path, f"its manifest is of step {self.step}")
        self._tensors = Mapped(self.path, self.catalog)
        with unless_changed(self.catalog):
            self._tensors.check(self._tensors.share_of(ranks.rank, ranks.size))

    @property
    def world_size(self) -> int:
        """Ranks of the job that saved."""
        return len(self._ranks)

    def check(self, objects: dict[str, Any]) -> None:
        """Compare all objects with the file, before any is changed.

        Raises:
            CheckpointMismatch: They are others.
        """
        for name in in_order(objects):
            value = objects[name]
            try:
                saved = decode(self._tree(name, value), self.catalog.kinds.__getitem__)
                check_fits(name, value, saved)
                self._position(name, value)
            except CheckpointMismatch as e:
                raise CheckpointMismatch(
                    e.what, path=str(self.path), seen=f"{e.seen}; in {self.path}", fix=e.fix
                ) from None

    def load(self, objects: dict[str, Any]) -> None:
        """Put all objects back, then the random generators."""
        with unless_changed(self.catalog):
            self._load(objects)
        if self._rank < self.world_size:
            restore_random_state(decode(self._random[self._rank], str))
        else:
            seed_new_rank(decode(self._random[0], str), self._rank)

    def _load(self, objects: dict[str, Any]) -> None:
        for name in in_order(objects):
            value = objects[name]
            position = self._position(name, value)
            if is_divided(value) and not isinstance(value, PerRank):
                self._load_parts(name, bare(value))
            elif position is not None:
                bare(value).load_state_dict(position)
            else:
                load_into(name, value, self._tree(name, value), self._tensors.tensor)

    def _position(self, name: str, value: Any) -> Mapping[str, Any] | None:
        """Return the state with which a loader resumes; None: it is as it was saved.

        Raises:
            CheckpointMismatch: As many ranks as there are cannot resume at these positions.
        """
        saved = [own.get(POSITIONS, {}) for own in self._ranks]
        if not isinstance(value, Positioned) or not all(name in own for own in saved):
            return None
        try:
            positions = [decode(own[name], str) for own in saved]
            state = decode(self._tree(name, value), str)
            return value.state_at(state, positions, self._rank, self._num_ranks)
        except (ValueError, LookupError, TypeError, AttributeError) as e:
            raise CheckpointMismatch(
                f"{name!r} does not take the saved state", seen=f"{type(e).__name__}: {e}"
            ) from e

    def _load_parts(self, name: str, value: Any) -> None:
        """Fill the tensors of a module or an optimizer with what this rank has of them."""
        alone = Ranks(None, alone=True)
        try:
            load_from(self.path, {name: value}, alone, False, lambda _: self.catalog)
        except CheckpointException as e:
            raise alone.lowest(e) from None

    def _tree(self, name: str, value: Any) -> Any:
        saved: dict[str, Any] = self.catalog.tree
        if isinstance(value, PerRank):
            if self._num_ranks != self.world_size:
                raise CheckpointMismatch(
                    f"{name!r} was saved by each rank, and the number of ranks is another",
                    seen=f"{self.world_size} ranks saved it, {self._num_ranks} load it",
                    fix="Load it with as many ranks as saved it.",
                )
            saved = self._ranks[self._rank]
        if name not in saved:
            raise CheckpointMismatch(
                f"there is no {name!r} in the checkpoint",
                seen=f"it has {sorted(saved.keys() - {RANDOM, RUN, POSITIONS})}",
                fix="Pass the same names, and PerRank where it was, to save and load.",
            )
        return saved[name]
