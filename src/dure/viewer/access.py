"""Who may see a page: the gate in front of every request.

A page is served on 127.0.0.1, which every user of the host can reach, and every page of every
browser on it. So three things are asked of a request:

* *Host* names this machine's loopback, so that no other name that was made to lead here (DNS
  rebinding) passes as the page's own. The port may be another: `ssh -L` forwards one.
* *Origin* and *Sec-Fetch-Site*, if the browser sends them, show that the page itself asks. Only
  the first page, which shows nothing, may be opened from elsewhere: by a link in a terminal.
* A *cookie*, except for that first page and its script. It is given once, for the token in
  the address that was printed, to the first browser that asks; HttpOnly, SameSite=Strict.

Browsers send cookies to every port of a host. A server of another user on another port would be
given this one, did it not have a path that is a secret, too: the page's own, below which it lies.
The token is behind the `#` of the address, which browsers send to no server; the script posts it.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie

__all__ = ["COOKIE", "HEADERS", "Access", "listen"]

COOKIE = "dure_page"
_LOOPBACK = re.compile(r"(?:127\.0\.0\.1|localhost|\[::1\])(?::\d{1,5})?", re.ASCII)
_ASKED_BY_ITSELF = ("same-origin", "none", "")

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""What every answer carries: nothing from elsewhere runs or loads, no text becomes markup, and no
other page frames this one, learns its address, or keeps it."""


def listen() -> socket.socket:
    """Return a socket that listens on a free port of 127.0.0.1."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=32)
    listening.setblocking(False)
    return listening


def _secret() -> str:
    return secrets.token_urlsafe(32)


@dataclass(slots=True)
class Access:
    """The secrets of one page.

    Attributes:
        token: Part of the address, until it has been exchanged; empty from then on.
        path: Below which everything lies that shows something.
    """

    token: str = field(default_factory=_secret, repr=False)
    path: str = field(default_factory=_secret, repr=False)
    _cookie: str = field(default_factory=_secret, repr=False)

    def exchange(self, token: str) -> str | None:
        """Return the cookie's header for the token, once; None for anything else."""
        if not self.token or not _equal(token, self.token):
            return None
        self.token = ""
        return f"{COOKIE}={self._cookie}; Path=/{self.path}/; HttpOnly; SameSite=Strict"

    def refusal(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        """Return why a request is not answered, as (status, text); None: it is.

        Args:
            method: Of the request.
            path: Of its address.
            headers: By their names in small letters.
        """
        host = headers.get("host", "")
        if not _LOOPBACK.fullmatch(host):
            return 421, "This page answers to 127.0.0.1 and localhost only."
        first = method == "GET" and path == "/"
        if headers.get("origin", f"http://{host}") != f"http://{host}":
            return 403, "Another page has asked."
        if not first and headers.get("sec-fetch-site", "") not in _ASKED_BY_ITSELF:
            return 403, "Another page has asked."
        if method == "POST" and "origin" not in headers:
            return 403, "Nobody says who asks."
        if first or path == "/session" or path.startswith("/static/"):
            return None
        if not path.startswith(f"/{self.path}/") or not self._has_cookie(headers):
            return 403, "Open the address that `dure` has printed; it can be used once."
        return None

    def _has_cookie(self, headers: dict[str, str]) -> bool:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return found is not None and _equal(found.value, self._cookie)


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
