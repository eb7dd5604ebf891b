"""Who may see a page, request by request."""

from __future__ import annotations

import pytest

from dure.viewer.access import COOKIE, Access

HOST = {"host": "127.0.0.1:4000"}


def entered(access: Access) -> dict[str, str]:
    """Return the headers of who has exchanged the token."""
    given = access.exchange(access.token)
    assert given is not None
    return HOST | {"cookie": given.partition(";")[0]}


def test_token_is_exchanged_once() -> None:
    access = Access()
    token = access.token
    assert access.exchange("wrong") is None
    assert access.exchange("") is None
    assert access.exchange(token) is not None
    assert access.exchange(token) is None
    assert access.exchange("") is None  # which is what is left of it


def test_secrets_are_long_different_and_not_shown() -> None:
    one, other = Access(), Access()
    assert len({one.token, one.path, other.token, other.path}) == 4
    assert min(len(one.token), len(one.path)) >= 43  # 256 bits
    assert one.token not in repr(one)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:80", "LOCALHOST:80", "[::1]:4000", ""])
def test_hosts(host: str) -> None:
    refused = Access().refusal("GET", "/", {"host": host})
    assert (refused is None) == (host in ("127.0.0.1", "localhost:80", "[::1]:4000"))


def test_page_needs_the_cookie_and_its_own_path() -> None:
    access = Access()
    headers = entered(access)
    assert access.refusal("GET", f"/{access.path}/events", headers) is None
    assert access.refusal("GET", f"/{access.path}/events", HOST) is not None
    assert access.refusal("GET", "/events", headers) is not None
    assert access.refusal("GET", f"/{access.path}", headers) is not None
    other = Access()
    assert other.refusal("GET", f"/{other.path}/events", headers) is not None
    broken = HOST | {"cookie": f'{COOKIE}="\x00; ;;=,{COOKIE}'}
    assert access.refusal("GET", f"/{access.path}/events", broken) is not None


def test_who_asks_is_looked_at_before_the_cookie() -> None:
    access = Access()
    headers = entered(access)
    path = f"/{access.path}/"
    assert access.refusal("GET", path, headers | {"origin": "http://127.0.0.1:4000"}) is None
    assert access.refusal("GET", path, headers | {"origin": "http://127.0.0.1:4001"}) is not None
    assert access.refusal("GET", path, headers | {"sec-fetch-site": "same-site"}) is not None
    assert access.refusal("GET", path, headers | {"sec-fetch-site": "same-origin"}) is None
    # A link may lead to the first page, which shows nothing; not a script of another page.
    assert access.refusal("GET", "/", HOST | {"sec-fetch-site": "cross-site"}) is None
    assert access.refusal("POST", "/session", HOST | {"sec-fetch-site": "cross-site"}) is not None
    assert access.refusal("POST", "/session", HOST) is not None
    assert access.refusal("POST", "/session", HOST | {"origin": "http://127.0.0.1:4000"}) is None
