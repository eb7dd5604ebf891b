"""Who holds the lock on a checkpoint folder, and whether a process is of the holder's job.

A record names the process, and the jobs that it was in. A process is of the holder's job

- if both have a token of it: that of their world, or one that came with a save of both; or
- if one of them has started the other by fork, multiprocessing or `dure.spawn`, as a notebook
  starts ranks. They have one multiprocessing key; a program that is executed has another key.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import secrets
import socket

import msgspec

from dure.comm.world import current_world
from dure.store.identity import Identity, alive, myself, stat_of

__all__ = ["LockRecord", "is_alive", "is_of_this_job", "new_record", "note_job"]


class LockRecord(msgspec.Struct, frozen=True):
    """The holder of a lock."""

    job: str
    process: Identity
    jobs: tuple[str, ...] = ()
    """Tokens of the jobs that the holder was in when it took the lock: its own, its world's."""
    program: str = ""
    """Equal for a process and those that it starts by fork, multiprocessing or `dure.spawn`."""
    inode: int = 0
    """Of the file: the file in a copy of the folder has another one."""


def _me() -> Identity:
    try:
        return myself()
    except OSError:  # not Linux
        return Identity(os.getpid(), "", socket.gethostname(), "")


def is_alive(process: Identity) -> bool | None:
    """Return whether a process lives; None: that cannot be known from here."""
    try:
        return alive(process)
    except OSError:
        return None


_jobs: set[str] = set()
"""Tokens of the jobs that this process is in: its own, and those that it has received."""
_own: list[str] = []


def note_job(token: str) -> None:
    """Note that this process belongs to the job with that token."""
    _jobs.add(token)


def new_record(inode: int) -> LockRecord:
    """Return the record of this process."""
    if not _own:
        _own.append(secrets.token_hex(16))
        note_job(_own[0])
    jobs = {_own[0], _note_world() or _own[0]}
    return LockRecord(_own[0], _me(), tuple(sorted(jobs)), _program(), inode)


def _note_world() -> str | None:
    """Note that this process belongs to the job of its world; return that job's token."""
    rendezvous = current_world().rendezvous
    if rendezvous is None:
        return None
    token = rendezvous.members[0].token
    note_job(token)
    return token


def _program() -> str:
    key = multiprocessing.current_process().authkey
    return hashlib.blake2b(key, digest_size=16, person=b"dure lock").hexdigest()


def _descends(process: Identity, ancestor: Identity) -> bool:
    """Return whether a process was started by another one, or by one that it started.

    Both must be alive and of this host, and so must be the processes between them.
    """
    if process.pid == ancestor.pid or not (is_alive(process) and is_alive(ancestor)):
        return False
    pid = process.pid
    try:
        while pid not in (0, ancestor.pid):
            pid = int(stat_of(pid)[1])
    except OSError:
        return False
    return pid != 0


def is_of_this_job(found: LockRecord) -> bool:
    """Return whether the holder of a lock belongs to a job of this process."""
    _note_world()
    if not _jobs.isdisjoint((found.job, *found.jobs)):
        return True
    if found.program != _program():
        return False
    me, holder = _me(), found.process
    return _descends(me, holder) or _descends(holder, me)


def _forget_all() -> None:
    """In a forked child: the tokens belong to the parent."""
    _own.clear()
    _jobs.clear()


os.register_at_fork(after_in_child=_forget_all)
