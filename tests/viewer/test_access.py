"""Who may see a page, request by request."""

import pytest

from dure.viewer.access import COOKIE, Access

HOST = {"host": "127.0.0.1:4000"}


def entered(access: Access) -> dict[str, str]:
    """Return the headers of who has exchanged the token."""
    given = access.exchange(access.token)
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


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:80", "[::1]:4000", "localhost:8000"])
def test_this_machine_and_its_forwarded_ports_may_ask(host: str) -> None:
    assert Access().refusal("GET", "/", {"host": host, "origin": f"http://{host}"}) is None


@pytest.mark.parametrize(
    "host",
    [
        "",
        "LOCALHOST:80",
        "0.0.0.0:4000",
        "192.168.0.1:4000",
        "evil.example",
        "evil.example:4000",
        "localhost.evil.example",
        "127.0.0.1.evil.example:4000",
        "127.0.0.1:4000@evil.example",
        "127.0.0.1:4000\tx",
    ],
)
def test_another_host_is_refused_even_with_the_cookie(host: str) -> None:
    access = Access()
    headers = entered(access) | {"host": host}
    for path in ("/", "/static/page.js", f"/{access.path}/", f"/{access.path}/events"):
        assert access.refusal("GET", path, headers) is not None


@pytest.mark.parametrize(
    "asked_by",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:4001"},
        {"origin": "https://127.0.0.1:4000"},
        {"origin": "http://127.0.0.1:4000.evil.example"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_another_page_is_refused_even_with_the_cookie(asked_by: dict[str, str]) -> None:
    access = Access()
    headers = entered(access) | asked_by
    assert access.refusal("GET", f"/{access.path}/events", headers) is not None
    assert access.refusal("POST", "/session", HOST | asked_by) is not None


def test_page_needs_the_cookie_and_its_own_path() -> None:
    access = Access()
    headers = entered(access)
    assert access.refusal("GET", f"/{access.path}/events", headers) is None
    assert access.refusal("GET", f"/{access.path}/events", HOST) is not None
    assert access.refusal("GET", "/events", headers) is not None
    assert access.refusal("GET", f"/{access.path}", headers) is not None
    other = Access()
    assert other.refusal("GET", f"/{other.path}/events", headers) is not None
    value = headers["cookie"].partition("=")[2]
    for wrong in (f"{value[:-1]}", f"{value}x", "", f'"\x00; ;;=,{COOKIE}'):
        broken = HOST | {"cookie": f"{COOKIE}={wrong}"}
        assert access.refusal("GET", f"/{access.path}/events", broken) is not None
    assert access.refusal("GET", "/", HOST | {"cookie": f"other={value}"}) is None


def test_the_first_page_may_be_opened_by_a_link_and_the_page_asks_itself() -> None:
    access = Access()
    headers, path = entered(access), f"/{access.path}/"
    assert access.refusal("GET", path, headers | {"origin": "http://127.0.0.1:4000"}) is None
    assert access.refusal("GET", path, headers | {"sec-fetch-site": "same-origin"}) is None
    # A link may lead to the first page, which shows nothing; not a script of another page.
    assert access.refusal("GET", "/", HOST | {"sec-fetch-site": "cross-site"}) is None
    assert access.refusal("POST", "/session", HOST) is not None
    assert access.refusal("POST", "/session", HOST | {"origin": "http://127.0.0.1:4000"}) is None
