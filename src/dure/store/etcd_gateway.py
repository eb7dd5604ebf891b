"""Talking to etcd through its JSON gateway (the /v3 API over HTTP): requests and watches.

An etcd cluster has several members. A request goes to one of them, and to the next one if that one
is gone, has no leader, or does not answer for `ANSWER_S`. If a request has no answer, it may have
been carried out or not: `Unanswered` reports that, and the caller settles it (see `etcd`).
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import random
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from dure import env
from dure.errors import StoreError, StoreRefused, UsageError
from dure.store.etcd_requests import Json
from dure.store.key import read_key_file

__all__ = [
    "ANSWER_S",
    "EtcdOptions",
    "EtcdWatch",
    "Gateway",
    "Unanswered",
    "parsed",
]

_PORT = 2379
ANSWER_S = 2.0
"""How long one member may take for an answer before another one is asked."""

QUIET_S = 15.0
"""How long a watch may be without an event before it is opened again at another member."""

_CONNECT_S = 2.0
_LONGEST_PASSWORD = 1024
_WORDS = {"cacert", "cert", "key", "user", "password_file"}

_UNAUTHENTICATED, _PERMISSION, _UNAVAILABLE = 16, 7, 14
_PASSING = {1, 4, 8, _UNAVAILABLE}
"""gRPC codes of what passes: cancelled, too slow, too many requests, no leader."""

_STALE_TOKEN = ("invalid auth token", "revision of auth store is old")


class Unanswered(Exception):
    """No member answered, or the one that was asked has no leader; it may have been done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdOptions:
    """Where an etcd cluster is, and the user that connects.

    Attributes:
        endpoints: The members, as HOST or HOST:PORT.
        cacert: File with the certificates that sign the members'; with it, or with `cert`, the
            way is TLS. Without both it is TLS with the system's certificates, but plain to a
            loopback address, or where DURE_INSECURE=1 allows it.
        cert: File with our own certificate.
        key: File with its key.
        user: Our name, if etcd asks for one.
        password: Our password.

    Example:
        ```python
        from dure.store.etcd_gateway import EtcdOptions

        options = EtcdOptions(endpoints=("etcd-0:2379", "etcd-1:2379"), user="training")
        ```
    """

    endpoints: tuple[str, ...]
    cacert: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = field(default="", repr=False)

    @classmethod
    def read(cls, endpoints: str, words: dict[str, str]) -> EtcdOptions:
        """Make options of ``HOST:PORT[,HOST:PORT]`` and words as `--rdzv-conf` has them.

        They are cacert, cert, key, user and password_file, the path of a file that only this user
        can read. Ranks of `dure run` have the password from the descriptor DURE_ETCD_PASSWORD_FD.

        Raises:
            UsageError: A word is unknown, or an endpoint is none.
            StoreError: The password's file cannot be read, or is open to others.
        """
        unknown = sorted(set(words) - _WORDS)
        if unknown:
            raise UsageError(
                f"etcd has no option {', '.join(unknown)}",
                fix=f"Options are {', '.join(sorted(_WORDS))}.",
            )
        members = tuple(each for each in endpoints.split(",") if each)
        for each in members or ("",):
            _host_and_port(each)
        words = dict(words)
        path, fd = words.pop("password_file", ""), env.integer("DURE_ETCD_PASSWORD_FD")
        raw = b""
        if path:
            raw = read_key_file(Path(path), _LONGEST_PASSWORD)
        elif fd is not None:
            raw = os.pread(fd, _LONGEST_PASSWORD, 0)
        return cls(endpoints=members, password=raw.decode().rstrip("\n"), **words)

    @classmethod
    def from_url(cls, url: str) -> tuple[EtcdOptions, str]:
        """Read ``etcd://HOST:PORT[,HOST:PORT]/JOB[?cacert=...]``; return the job's name as well.

        Raises:
            UsageError: It is not of that form.
            StoreError: As `read`.
        """
        parts = urlsplit(url)
        job = parts.path.strip("/")
        if parts.scheme != "etcd" or not parts.netloc or not job or "@" in parts.netloc:
            raise UsageError(
                "the address of a job in etcd cannot be understood",
                seen=repr(url),
                fix="Write etcd://HOST:2379[,HOST:2379]/JOB, with a name of its own for each job.",
            )
        words = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        words = {name: word for name, word in words.items() if name not in ("rank", "world_size")}
        return cls.read(parts.netloc, words), job

    def url(self, job: str) -> str:
        """Write these options as `from_url` reads them, without the password."""
        words = {"cacert": self.cacert, "cert": self.cert, "key": self.key, "user": self.user}
        query = urlencode({name: word for name, word in words.items() if word})
        return f"etcd://{','.join(self.endpoints)}/{quote(job)}" + (f"?{query}" if query else "")


class Gateway:
    """The way to an etcd cluster; it holds no connection itself.

    Attributes:
        first: Which member new connections ask, modulo how many there are.

    Threads:
        Any number.
    """

    def __init__(self, options: EtcdOptions) -> None:
        self.options = options
        self._members = [_host_and_port(each) for each in options.endpoints]
        self._tls = self._trusted()
        self.token = ""  # proves the user; empty before the first `authenticate`
        self._lock = threading.Lock()
        self.first = random.randrange(len(self._members))

    def __str__(self) -> str:
        return f"etcd at {','.join(self.options.endpoints)}"

    def connection(self) -> EtcdConnection:
        """Return a connection for one thread at a time; it opens when it is used."""
        return EtcdConnection(self)

    def open(self, number: int) -> http.client.HTTPConnection:
        """Return a connection to the member `number`, modulo how many there are."""
        host, port = self._members[number % len(self._members)]
        if self._tls is None:
            return http.client.HTTPConnection(host, port, timeout=_CONNECT_S)
        return http.client.HTTPSConnection(host, port, timeout=_CONNECT_S, context=self._tls)

    def headers(self) -> dict[str, str]:
        """Return what goes with every request: a member without a leader must report it at once."""
        token = {"Authorization": self.token} if self.token else {}
        return {"Grpc-Metadata-hasleader": "true", "Content-Type": "application/json"} | token

    def authenticate(self, connection: EtcdConnection, stale: str) -> None:
        """Get a token in place of `stale`, unless another thread has done so.

        Raises:
            StoreRefused: The name or password is wrong.
            Unanswered: No member answered.
        """
        with self._lock:
            if self.token != stale:
                return
            words = {"name": self.options.user, "password": self.options.password}
            self.token = ""
            answer = connection.ask_once("auth/authenticate", words)
            self.token = str(answer["token"])

    def _trusted(self) -> ssl.SSLContext | None:
        """Return how to recognise the members; None: the way is plain."""
        options = self.options
        if not options.cacert and not options.cert:
            near = all(_is_loopback(host) for host, _ in self._members)
            if near or env.flag("DURE_INSECURE"):
                return None
        try:
            context = ssl.create_default_context(cafile=options.cacert or None)
            if options.cert:
                context.load_cert_chain(options.cert, options.key or None)
        except OSError as error:  # ssl.SSLError is one
            raise StoreError(
                "etcd's certificates cannot be read",
                seen=f"{', '.join(filter(None, (options.cacert, options.cert, options.key)))}: "
                f"{error.strerror or error}",
                fix="Check cacert, cert and key: files in PEM form that this user may read.",
            ) from None
        return context


class EtcdWatch:
    """A watch whose events a thread reads, so that waiting for one can end at any time.

    Args:
        gateway: The way to etcd.
        where: The key or the range of keys.
        start: The first revision that counts.

    Threads:
        Any; a thread of its own reads the events.
    """

    def __init__(self, gateway: Gateway, where: Json, start: int) -> None:
        self._where, self._start = where, start
        self._latest, self._ended = 0, False
        self._changed = threading.Condition()
        self._connection = gateway.connection()
        threading.Thread(target=self._run, name="dure-etcd-watch", daemon=True).start()

    def await_change(self, since: int, limit_s: float) -> None:
        """Return when keys have changed at or after the revision `since`, or it may be so."""
        with self._changed:
            self._changed.wait_for(lambda: self._latest >= since or self._ended, limit_s)

    @property
    def has_ended(self) -> bool:
        """Whether it must be opened again."""
        return self._ended

    def close(self) -> None:
        """Close the connection; a thread that waits returns."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._connection.shut_down()

    def _run(self) -> None:
        try:
            for revision in self._connection.events(self._where, self._start):
                with self._changed:
                    self._latest = max(self._latest, revision)
                    self._changed.notify_all()
                if self._ended:
                    return
        except (Unanswered, StoreError):
            pass  # the caller asks how things stand, and learns of the same trouble
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()


class EtcdConnection:
    """An HTTP connection to one member, opened again, to the next one, when it fails.

    Threads:
        One at a time.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._number = gateway, gateway.first
        self._http: http.client.HTTPConnection | None = None

    def ask(self, path: str, body: Json, answer_s: float = ANSWER_S) -> Json:
        """Put one request, to one member; with a new token if the old one has expired.

        Raises:
            Unanswered: It may have been done or not; the next request goes to another member.
            StoreRefused: The user may not, or is not the one it claims to be.
            StoreError: etcd cannot do it; the text has its reason.
        """
        if self._gateway.options.user and not self._gateway.token:
            self._gateway.authenticate(self, "")
        for _ in range(2):
            token = self._gateway.token
            try:
                return self.ask_once(path, body, answer_s)
            except _StaleToken:
                self._gateway.authenticate(self, token)
        raise Unanswered("a token that was new was refused")

    def ask_once(self, path: str, body: Json, answer_s: float = ANSWER_S) -> Json:
        """Put one request with the token there is; otherwise as `ask`."""
        response = self._send(path, body, answer_s)
        try:
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(error) from None
        answer = parsed(text)
        if response.status != 200 or "error" in answer:
            raise self._complaint(answer)
        return answer

    def events(self, where: Json, start: int) -> Iterator[int]:
        """Watch keys; yield 0, then the revision of each change from the revision `start` on.

        It ends when the member sent nothing for `QUIET_S` (it may be cut off from its cluster, and
        not know it yet), or has forgotten changes since `start`, or when `shut_down` is called.

        Raises:
            Unanswered: The member is gone or has no leader.
        """
        if self._gateway.options.user:
            self.ask("kv/range", {"key": where["key"], "count_only": True})  # for a valid token
        create = where | {"start_revision": str(start)}
        try:
            response = self._send("watch", {"create_request": create}, ANSWER_S)
            assert self._http is not None
            if self._http.sock is not None:
                self._http.sock.settimeout(QUIET_S)
            yield 0  # from here on `shut_down` has something to shut down
            while line := response.readline():
                word = parsed(line)
                if "error" in word:
                    raise self._complaint(word)
                if word["result"].get("canceled"):
                    return
                for event in word["result"].get("events", ()):
                    yield int(event["kv"]["mod_revision"])
            raise Unanswered("a watch ended")
        except TimeoutError:
            self._gateway.first = self._number + 1
        except _StaleToken as error:
            raise Unanswered(str(error)) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._failed(error) from None
        finally:
            self.close()

    def shut_down(self) -> None:
        """End `events` in another thread."""
        sock = None if self._http is None else self._http.sock
        with contextlib.suppress(OSError):
            if sock is not None:
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it; the next request opens it again."""
        if self._http is not None:
            with contextlib.suppress(OSError):
                self._http.close()
            self._http = None

    def _send(self, path: str, body: Json, answer_s: float) -> http.client.HTTPResponse:
        try:
            if self._http is None:
                self._http = self._gateway.open(self._number)
                self._http.connect()
            self._http.sock.settimeout(answer_s)
            data = json.dumps(body).encode()
            self._http.request("POST", f"/v3/{path}", data, self._gateway.headers())
            return self._http.getresponse()
        except ssl.SSLError as error:
            self.close()
            raise _untrusted(self._gateway, error) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(error) from None

    def _failed(self, error: Exception) -> Unanswered:
        """Turn to another member."""
        self.close()
        self._number += 1
        self._gateway.first = self._number
        return Unanswered(f"{type(error).__name__}: {error}")

    def _complaint(self, answer: Json) -> Exception:
        """Make the error that an answer reports."""
        error = answer.get("error", "")
        detail = cast(Json, error) if isinstance(error, dict) else answer
        text = str(detail.get("message") or error or "no reason given")
        code = int(detail.get("code", detail.get("grpc_code", 2)))
        if any(words in text for words in _STALE_TOKEN):
            return _StaleToken(text)
        if code in _PASSING and "space exceeded" not in text:
            return self._failed(Unanswered(text))
        if code in (_PERMISSION, _UNAUTHENTICATED) or "auth" in text or "user" in text:
            return StoreRefused(
                f"{self._gateway} refused this process",
                seen=f"{text}; the user is {self._gateway.options.user!r}",
                fix="Check the user, the file of the password, and what the user's role may do.",
            )
        return StoreError(f"{self._gateway} cannot do what was asked", seen=text)


class _StaleToken(Exception):
    """The token has expired, or users and roles have changed since."""


def _untrusted(gateway: Gateway, error: ssl.SSLError) -> Exception:
    if "certificate" not in str(error).lower() and "WRONG_VERSION" not in str(error):
        return Unanswered(str(error))
    return StoreRefused(
        f"no trusted connection to {gateway} can be made",
        seen=str(error.reason or error),
        fix="Give cacert= (and cert= and key= if etcd wants them); etcd must be reached under a "
        "name that its certificate has. To an etcd without TLS only loopback, or DURE_INSECURE=1.",
    )


def parsed(text: bytes) -> Json:
    """Read a JSON object.

    Raises:
        StoreError: It is none.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise StoreError(
            "what answers at etcd's address is no etcd", seen=repr(text[:60]), fix="Check the port."
        )
    return cast(Json, found)


def _host_and_port(endpoint: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{endpoint}")
        if not parts.hostname or parts.path:
            raise ValueError(endpoint)
        return parts.hostname, parts.port or _PORT
    except ValueError:
        raise UsageError(
            "an endpoint of etcd cannot be understood",
            seen=repr(endpoint),
            fix="Write HOST:2379, several with commas between them.",
        ) from None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
