"""Saving while training continues: `async_save` copies, and a thread writes.

The call exchanges what ranks have, and each copies the slices that it will write. The rest is what
`save` does, in a thread and over a group of its own, so that its exchanges do not meet those of the
training. One save at a time: the next waits for it.

The future raises what fails. An error that the program has not seen there fails the next save of
the group, on all ranks, before it takes a snapshot; if there is no next save, see
`dure.comm.background`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

from dure.checkpoint.agreement import Ranks
from dure.checkpoint.file_systems import file_system_of
from dure.checkpoint.folder import Folder
from dure.checkpoint.fsspec_path import AnyPath
from dure.checkpoint.lock import prepare_end
from dure.checkpoint.metadata import Metadata, read_later
from dure.checkpoint.planned import taken_of
from dure.checkpoint.planner import SavePlanner
from dure.checkpoint.saving import Saving, begin
from dure.checkpoint.staging import AsyncStager, DefaultStager
from dure.comm.background import BackgroundTask, wait_for_tasks
from dure.comm.group import ProcessGroup
from dure.comm.subgroups import new_group
from dure.comm.world import World, current_world
from dure.errors import CheckpointError

__all__ = ["AsyncSaveResponse", "Background", "background_of", "wait_for_saves"]


class AsyncSaveResponse(BackgroundTask[Metadata]):
    """A save in the background: a future of what the checkpoint holds, done when it is on the disk.

    It has the two futures of torch's class of this name, too. As the snapshot is taken before it is
    returned, the first is done. A save cannot be canceled.

    Obtained from:
        `async_save`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.staging_completion: Future[None] = Future()
        self.staging_completion.set_result(None)

    @property
    def upload_completion(self) -> Future[Metadata]:
        """The save."""
        return self


class Background:
    """The saves of one group, one after another.

    Args:
        ranks: Those that save, in a group that nothing else uses.
        users: The group that the program passed; None: this process alone.
    """

    def __init__(self, ranks: Ranks, users: ProcessGroup | None) -> None:
        self._ranks = ranks
        self._groups = [group for group in (users, ranks.group) if group is not None]
        self._stager = DefaultStager()
        self._last: AsyncSaveResponse | None = None

    def save(
        self,
        path: AnyPath,
        state_dict: Mapping[str, Any],
        replace: bool,
        stager: AsyncStager | None,
        planner: SavePlanner | None = None,
    ) -> AsyncSaveResponse:
        """Save a state into the folder `path`; returns when the state may be changed.

        Raises:
            CheckpointException: The state cannot be saved, or the save before failed on some rank
                and the program did not see it there.

        Collective:
            All of the ranks. Two exchanges or three, and two in the thread.
        """
        last, self._last = self._last, None
        if last is not None:
            last.join()
        wait_for_saves(path)

        def before() -> None:
            error = None if last is None else last.unseen_error()
            if error is not None:
                raise CheckpointError("the save before failed", seen=f"{error}") from error

        state = state_dict if planner is None else taken_of(state_dict, planner, self._ranks)
        saving = Saving(self._ranks, state, before)
        saving.hold((stager or self._stager).hold)

        def run() -> Metadata:
            folder = Folder(path)
            try:
                number = self._ranks.first_or_none(
                    "the checkpoint was not saved", lambda: begin(folder, replace)
                )
                return read_later(path, saving.write(folder, path, number))
            except BaseException as e:
                e.add_note(f"while {path} was saved in the background")
                raise
            finally:
                folder.release()

        prepare_end(path)
        outcome = AsyncSaveResponse()
        outcome.start(run, "dure-save", self._groups, _subject(path))
        self._last = outcome
        return outcome


def wait_for_saves(path: AnyPath) -> None:
    """Wait for this rank's saves in the background into a folder: one at a time may save there."""
    wait_for_tasks(_subject(path))


def _subject(path: AnyPath) -> tuple[str, str]:
    return "save", file_system_of(path).key(path)


_alone: WeakKeyDictionary[World, Background] = WeakKeyDictionary()
os.register_at_fork(after_in_child=_alone.clear)


def background_of(ranks: Ranks) -> Background:
    """Return what saves for these ranks; the first time, it gets a group of its own.

    Collective:
        All of `ranks`, the first time.
    """
    group = ranks.group
    if group is None:
        return _alone.setdefault(current_world(), Background(ranks, None))
    if Background not in group.belongings:
        own = new_group(
            group.global_ranks,
            use_local_synchronization=True,
            group_desc="checkpoint",
            sort_ranks=False,
        )
        assert isinstance(own, ProcessGroup)
        group.companions.append(own)
        group.belongings[Background] = Background(Ranks(own, "async_save"), group)
    return group.belongings[Background]
