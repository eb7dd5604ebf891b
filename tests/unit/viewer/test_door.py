"""Who may see a page, request by request."""

from __future__ import annotations

import pytest

from dure.viewer.door import COOKIE, Door

HOST = {"host": "127.0.0.1:4000"}


def entered(door: Door) -> dict[str, str]:
    """Return the headers of who has exchanged the token."""
    given = door.exchange(door.token)
    assert given is not None
    return HOST | {"cookie": given.partition(";")[0]}


def test_token_is_exchanged_once() -> None:
    door = Door()
    token = door.token
    assert door.exchange("wrong") is None
    assert door.exchange("") is None
    assert door.exchange(token) is not None
    assert door.exchange(token) is None
    assert door.exchange("") is None  # which is what is left of it


def test_secrets_are_long_different_and_not_shown() -> None:
    one, other = Door(), Door()
    assert len({one.token, one.path, other.token, other.path}) == 4
    assert min(len(one.token), len(one.path)) >= 43  # 256 bits
    assert one.token not in repr(one)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:80", "LOCALHOST:80", "[::1]:4000", ""])
def test_hosts(host: str) -> None:
    refused = Door().refusal("GET", "/", {"host": host})
    assert (refused is None) == (host in ("127.0.0.1", "localhost:80", "[::1]:4000"))


def test_page_needs_the_cookie_and_its_own_path() -> None:
    door = Door()
    headers = entered(door)
    assert door.refusal("GET", f"/{door.path}/events", headers) is None
    assert door.refusal("GET", f"/{door.path}/events", HOST) is not None
    assert door.refusal("GET", "/events", headers) is not None
    assert door.refusal("GET", f"/{door.path}", headers) is not None
    other = Door()
    assert other.refusal("GET", f"/{other.path}/events", headers) is not None
    broken = HOST | {"cookie": f'{COOKIE}="\x00; ;;=,{COOKIE}'}
    assert door.refusal("GET", f"/{door.path}/events", broken) is not None


def test_who_asks_is_looked_at_before_the_cookie() -> None:
    door = Door()
    headers = entered(door)
    path = f"/{door.path}/"
    assert door.refusal("GET", path, headers | {"origin": "http://127.0.0.1:4000"}) is None
    assert door.refusal("GET", path, headers | {"origin": "http://127.0.0.1:4001"}) is not None
    assert door.refusal("GET", path, headers | {"sec-fetch-site": "same-site"}) is not None
    assert door.refusal("GET", path, headers | {"sec-fetch-site": "same-origin"}) is None
    # A link may lead to the first page, which shows nothing; not a script of another page.
    assert door.refusal("GET", "/", HOST | {"sec-fetch-site": "cross-site"}) is None
    assert door.refusal("POST", "/session", HOST | {"sec-fetch-site": "cross-site"}) is not None
    assert door.refusal("POST", "/session", HOST) is not None
    assert door.refusal("POST", "/session", HOST | {"origin": "http://127.0.0.1:4000"}) is None
