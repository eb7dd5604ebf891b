"""Saving while training goes on: `async_save` copies, and a thread writes.

The call exchanges what ranks have, and each copies the slices that it will write. The rest is what
`save` does, in a thread and over a group of its own, so that its exchanges do not meet those of the
training. One save at a time: the next waits for it. What fails is raised by the future; a failure
that nobody saw there fails the next save, on all ranks, before it takes a snapshot.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextvars import copy_context
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from dure.checkpoint.agreement import Ranks
from dure.checkpoint.folder import Folder
from dure.checkpoint.metadata import Metadata, metadata_of
from dure.checkpoint.planned import taken_of
from dure.checkpoint.planner import SavePlanner
from dure.checkpoint.saving import Saving, begin
from dure.checkpoint.staging import AsyncStager, DefaultStager
from dure.comm.group import ProcessGroup
from dure.comm.subgroups import new_group
from dure.comm.world import World, current_world
from dure.errors import CheckpointError

__all__ = ["AsyncSaveResponse", "Background", "background_of"]


class AsyncSaveResponse(Future[Metadata]):
    """A save that goes on: a future of what the checkpoint holds, done when it is on the disk.

    It has the two futures of torch's class of this name, too. As the snapshot is taken before it is
    returned, the first is done.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False
        """Whether somebody has asked for its exception."""
        self.staging_completion: Future[None] = Future()
        self.staging_completion.set_result(None)

    @property
    def upload_completion(self) -> Future[Metadata]:
        """The save."""
        return self

    def result(self, timeout: float | None = None) -> Metadata:
        """Return what the checkpoint holds, when it is on the disk; or raise."""
        try:
            return super().result(timeout)
        finally:
            self.seen = self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return why the save failed; None: it did not."""
        error = super().exception(timeout)
        self.seen = True
        return error


class Background:
    """The saves of one group, one after another.

    Args:
        ranks: Those that save, in a group that nothing else uses.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._stager = DefaultStager()
        self._thread: threading.Thread | None = None
        self._last: AsyncSaveResponse | None = None

    def save(
        self,
        path: Path,
        state_dict: Mapping[str, Any],
        replace: bool,
        stager: AsyncStager | None,
        planner: SavePlanner | None = None,
    ) -> AsyncSaveResponse:
        """Save a state into the folder `path`; returns when the state may be changed.

        Raises:
            CheckpointException: The state cannot be saved, or the save before failed on some rank
                and nobody saw it there.

        Collective: all of the ranks. Two exchanges, and three in the thread.
        """
        if self._thread is not None:
            self._thread.join()
        last, self._last = self._last, None

        def before() -> None:
            error = None if last is None or last.seen else last.exception()
            if error is not None:
                raise CheckpointError("the save before failed", seen=f"{error}") from error

        state = state_dict if planner is None else taken_of(state_dict, planner, self._ranks)
        saving = Saving(self._ranks, state, before)
        saving.hold((stager or self._stager).hold)
        outcome = self._last = AsyncSaveResponse()

        def run() -> None:
            folder = Folder(path)
            try:
                number = self._ranks.all_or_none(
                    "the checkpoint was not saved",
                    lambda: begin(folder, replace) if self._ranks.rank == 0 else 0,
                )[0]
                made = metadata_of(saving.write(path, number))
            except BaseException as e:  # the future's to raise
                outcome.set_exception(e)
            else:
                outcome.set_result(made)
            finally:
                folder.release()

        context = copy_context()  # a rank that is a thread is known by it
        self._thread = threading.Thread(target=context.run, args=(run,), name="dure-save")
        self._thread.start()
        return outcome


_of_group: WeakKeyDictionary[ProcessGroup, Background] = WeakKeyDictionary()
_alone: WeakKeyDictionary[World, Background] = WeakKeyDictionary()


def background_of(ranks: Ranks) -> Background:
    """Return what saves for these ranks; the first time, it gets a group of its own.

    Collective: all of `ranks`, the first time.
    """
    if ranks.group is None:
        return _alone.setdefault(current_world(), Background(ranks))
    if ranks.group not in _of_group:
        members = ranks.group.global_ranks
        own = new_group(
            members, use_local_synchronization=True, group_desc="checkpoint", sort_ranks=False
        )
        assert isinstance(own, ProcessGroup)
        _of_group[ranks.group] = Background(Ranks(own, "async_save"))
    return _of_group[ranks.group]
