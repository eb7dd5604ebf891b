"""The job key: 32 random bytes that the ranks of a job share, and no other process has.

Where it comes from, the first that applies (`load_for`):

1. `DURE_JOB_KEY_FD`: a descriptor inherited from the launcher. It is read with `pread`, so its
   position never moves and every fork and grandchild can read it again.
2. `DURE_JOB_KEY_FILE`: a file that only this user can read. The launcher sets both, for processes
   that a rank starts without its descriptors, as `multiprocessing` does.
3. For programs started by hand, a key derived from the user's own, `~/.config/dure/key`, and the
   job's name: the scheduler's job, step and restart, else MASTER_ADDR:PORT. So what leaks opens one
   job, or the jobs of one address. The process on whose host the store lives makes the user's key
   on first use; a process that must reach another host only uses an existing one, for a
   key made here could not match the one made there.

From the one key both ends of the connection derive the CURVE key pairs of the server and of the
client: a secret key is BLAKE2b of the purpose, keyed with the job key, and the public key follows
from the secret one. The client knows the server's public key and the server admits the one client
public key, so each proves to the other that it holds the job key, and neither ever sends it.

A key is as safe as its file, so owner and mode are checked before a key is used: through the open
descriptor, so that the file cannot be exchanged between the check and the reading. Also behind
symbolic links, the file must belong to this user or root, and be closed to all others.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from dataclasses import dataclass, field
from hashlib import blake2b
from hmac import compare_digest
from pathlib import Path
from typing import Any, NoReturn

import zmq
from zmq.utils import z85

from dure import env
from dure.errors import StoreError
from dure.store.address import is_local

__all__ = [
    "KEY_BYTES",
    "SHARED_HOME_S",
    "CurvePair",
    "JobKey",
    "control_key",
    "key_from_file",
    "key_source",
    "load_for",
    "mint",
    "name_of",
    "read_key_file",
    "user_key_path",
]

KEY_BYTES = 32

SHARED_HOME_S = 3.0
"""How long a host waits for the key that the store's host makes on first use, in a shared home."""

_LOOK_S = 0.05
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def _refuse_to_travel(self: object, protocol: object = None) -> NoReturn:
    raise StoreError(
        f"a {type(self).__name__} is not pickled: pickles end up in files and messages",
        fix="Hand the key on as `dure run` does: by descriptor, or as the path of a key file.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePair:
    """A CURVE key pair in ZeroMQ's text form (Z85)."""

    public: bytes
    secret: bytes = field(repr=False)

    __reduce_ex__ = _refuse_to_travel


class JobKey:
    """The secret of a job.

    Its text form shows a fingerprint, never the key. It cannot be pickled, it is no dataclass that
    `asdict` would take apart, and keys are compared in constant time.

    Args:
        raw: The 32 bytes.

    Raises:
        StoreError: There are more of them, or fewer.

    Example:
        ```python
        import secrets
        from dure.store import JobKey

        key = JobKey(secrets.token_bytes(32))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, key=key)
        store.close()
        ```
    """

    __slots__ = ("_pairs", "raw")

    __reduce_ex__ = _refuse_to_travel

    def __init__(self, raw: bytes | bytearray | memoryview) -> None:
        if len(raw) != KEY_BYTES:
            raise StoreError(
                "a job key has the wrong length", seen=f"{len(raw)} bytes, not {KEY_BYTES}"
            )
        self.raw = bytes(raw)
        self._pairs: dict[str, CurvePair] = {}

    def __repr__(self) -> str:
        return f"JobKey(fingerprint={self.fingerprint})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobKey) and compare_digest(self.raw, other.raw)

    def __hash__(self) -> int:
        return hash(self.derive("hash"))

    @property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits that differ for different keys and reveal nothing of them."""
        return self.derive("fingerprint").hex()[:8]

    def derive(self, purpose: str) -> bytes:
        """Return 32 bytes for one purpose; those of another purpose cannot be found from them."""
        word = purpose.encode()
        return blake2b(word, key=self.raw, person=b"dure job key", digest_size=32).digest()

    def pair(self, purpose: str) -> CurvePair:
        """Return the CURVE key pair for one purpose ("store server", "store client")."""
        if purpose not in self._pairs:
            secret = z85.encode(self.derive(f"curve {purpose}"))
            self._pairs[purpose] = CurvePair(public=zmq.curve_public(secret), secret=secret)
        return self._pairs[purpose]

    def arm(self, socket: zmq.Socket[Any], purpose: str) -> None:
        """Give a socket the key pair for one purpose."""
        pair = self.pair(purpose)
        socket.curve_secretkey, socket.curve_publickey = pair.secret, pair.public


def mint() -> JobKey:
    """Return a new random key."""
    return JobKey(secrets.token_bytes(KEY_BYTES))


def control_key(user: JobKey, endpoint: str, job: str) -> JobKey:
    """Return the key of a job's agents, before they have the job key.

    Args:
        user: The key that the user gave them all.
        endpoint: Where they meet, in the spelling that all hosts use.
        job: The job's name (`--rdzv-id`).
    """
    return JobKey(user.derive(f"control {endpoint} {job}"))


def name_of(host: str, port: int) -> str:
    """Name a job that has no name: after the address at which its ranks meet, as written.

    All ranks must use the same spelling; only names of the loopback address are equal.
    """
    near = host == "::1" or host.startswith("127.")
    return f"{'localhost' if near else host.lower()}:{port}"


def user_key_path() -> Path:
    """Return where the user's own key lies, whether or not it exists."""
    base = env.text("XDG_CONFIG_HOME")
    try:
        return (Path(base) if base else Path.home() / ".config") / "dure" / "key"
    except RuntimeError:
        raise StoreError(
            "there is no place for the user's key",
            seen="this user has no home directory",
            fix="Set XDG_CONFIG_HOME, or DURE_JOB_KEY_FILE, or start with `dure run`.",
        ) from None


def load_for(host: str, wait_s: float = 0.0, job: str = "") -> JobKey:
    """Return this process's job key for a store on `host`.

    Args:
        host: Name or address of the store's host, as the user wrote it.
        wait_s: How long to wait for a key that is nowhere yet: in a home that all hosts share, the
            store's host may be making it just now.
        job: The job's name, which a key that is the user's own is derived for; "": it is not.

    Raises:
        StoreError: No key can be had, or its file is open to others. The text names what to do.
    """
    given = _given()
    if given is not None:
        return given[1]
    own, user = user_key_path(), None
    deadline = time.monotonic() + wait_s
    while user is None:
        if os.path.exists(own):  # False, unlike Path.exists, for a place that we may not look into
            user = key_from_file(own)
        elif is_local(host):
            user = _make(own)
        elif time.monotonic() >= deadline:
            raise StoreError(
                "this host has no job key",
                seen=f"the store is on another host, {host}, and {own} does not exist here",
                fix=f"Copy {own} from {host} (chmod 600), or set DURE_JOB_KEY_FILE, or start the "
                "program with `dure run`; on a network you trust wholly, set DURE_INSECURE=1 on "
                "every host.",
            )
        else:
            time.sleep(_LOOK_S)
    return JobKey(user.derive(f"job {job}")) if job else user


def key_source() -> tuple[str, JobKey | None]:
    """Return where this process's job key comes from, and the key; None where none is made yet.

    Raises:
        StoreError: There should be a key, but it cannot be read.
    """
    own = user_key_path()
    return _given() or (str(own), key_from_file(own) if os.path.exists(own) else None)


def _given() -> tuple[str, JobKey] | None:
    """Return the key that the environment names, and the variable that does."""
    fd, path = env.integer("DURE_JOB_KEY_FD"), env.text("DURE_JOB_KEY_FILE")
    if fd is not None:
        try:
            return f"DURE_JOB_KEY_FD={fd}", _from_fd(fd)
        except StoreError:
            if path is None:
                raise
    if path is None:
        return None
    try:
        return f"DURE_JOB_KEY_FILE={path}", key_from_file(Path(path))
    except StoreError as error:
        error.advise("It is DURE_JOB_KEY_FILE that names this file.")
        raise


def _from_fd(fd: int) -> JobKey:
    try:
        return JobKey(os.pread(fd, KEY_BYTES + 1, 0))
    except OSError as error:
        raise StoreError(
            "the job key's descriptor cannot be read",
            seen=f"DURE_JOB_KEY_FD={fd}: {error.strerror}",
            fix="Keep inherited descriptors open (close_fds=False), or use DURE_JOB_KEY_FILE.",
        ) from None


def key_from_file(path: Path) -> JobKey:
    """Return the key in a file.

    Raises:
        StoreError: It cannot be read, holds no key, or another user could have read or written it.
    """
    raw = read_key_file(path, KEY_BYTES + 1)  # one more, to see that there is no more
    if len(raw) != KEY_BYTES:
        has = f"{len(raw)} bytes" if len(raw) < KEY_BYTES else "more"
        raise StoreError(
            "the job key's file holds no key",
            seen=f"{path} has {has}, and a key {KEY_BYTES}",
            fix=f"Make a new one: `umask 077; head -c {KEY_BYTES} /dev/urandom > {path}`.",
        )
    return JobKey(raw)


def read_key_file(path: Path, most: int) -> bytes:
    """Return what is in a file that only this user can read, at most `most` bytes of it.

    Raises:
        StoreError: It cannot be read, or another user could have read or written it. The text names
            the command that changes that.
    """
    try:
        # without waiting: a pipe in its place would block forever
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            _check_file(path, os.fstat(fd))
            return os.read(fd, most)
        finally:
            os.close(fd)
    except OSError as error:
        raise StoreError(
            "the job key's file cannot be read",
            seen=f"{path}: {error.strerror}",
            fix="Check the path, and that you may read it.",
        ) from None


def _check_file(path: Path, info: os.stat_result) -> None:
    """Refuse what is not a regular file of this user (or root) that is closed to all others."""
    is_regular, is_ours = stat.S_ISREG(info.st_mode), info.st_uid in (os.getuid(), 0)
    if is_regular and is_ours and not info.st_mode & _OTHERS:
        return
    raise StoreError(
        "the job key's file is not a regular file that only this user can read",
        seen=f"{path} has mode {stat.filemode(info.st_mode)} and belongs to user {info.st_uid}; "
        f"this process is of user {os.getuid()}",
        fix=f"Run `chmod 600 {path}` if the file is yours, otherwise make a key file of your own. "
        "A user who could read the key may still have it: make a new one if that is not wanted. A "
        "key that comes through a pipe is for `dure run --key-stdin`.",
    )


def _make(path: Path) -> JobKey:
    """Make the user's key file; of several ranks that try at once, all return the same key.

    It is written to a file of its own and then linked into place: a link either appears, with
    the complete file, or fails if another process was first.
    """
    draft = path.with_name(f".key-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, secrets.token_bytes(KEY_BYTES))
            os.fsync(fd)
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            os.close(fd)
            draft.unlink()
    except OSError as error:
        raise StoreError(
            "the user's key cannot be made",
            seen=f"{error.filename or path}: {error.strerror}",
            fix="Make that directory writable, or set XDG_CONFIG_HOME or DURE_JOB_KEY_FILE.",
        ) from None
    return key_from_file(path)
