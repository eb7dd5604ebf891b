"""The page's server: a few files, and two streams of events, behind `Access`.

    GET  /                    the first page, which exchanges the token; it shows nothing
    POST /session             token in, cookie out
    GET  /static/...          style, scripts, the chart library: the same for all readers
    GET  /SECRET/             the page
    GET  /SECRET/events       what it shows, whenever that changes: `view`, `curves`, `over`
    GET  /SECRET/output?rank= the lines of a rank: `lines`

A reader that is slow gets the newest state, and no queue of old ones. The number of connections,
how long one may stay silent, and how much it may send are bounded, because every user of the host
can open connections.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from importlib.resources import files
from typing import Any  # Any: from ASGI

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from dure.viewer.access import HEADERS, Access
from dure.viewer.charts import Key
from dure.viewer.sources import PageSource

__all__ = ["LISTENERS", "application", "serve"]

LISTENERS = 16
"""How many streams are served at a time; a browser has two."""

_MOST_CONNECTIONS, _SILENT_S, _LONGEST_TOKEN = 64, 5.0, 256
_ADMITTED = "dure.admitted"
"""Set in the scope of requests for what the page shows."""
_KEEP_ALIVE_S, _EVERY_S = 15.0, 0.5  # between events, at most and at least
_TYPES = {"js": "text/javascript", "css": "text/css", "html": "text/html", "svg": "image/svg+xml"}
_STATIC = (
    "uPlot.iife.min.js",
    "uPlot.min.css",
    "page.css",
    "page.js",
    "drawing.js",
    "open.js",
    "icon.svg",
)

Messages = MutableMapping[str, Any]
Send = Callable[[Messages], Awaitable[None]]
Receive = Callable[[], Awaitable[Messages]]


class _Gate:
    """Lets requests in that `Access` does, and puts the headers on every answer."""

    def __init__(self, app: Starlette, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Messages, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        pairs = [(k.decode("latin-1").lower(), v.decode("latin-1")) for k, v in scope["headers"]]
        refused = self._access.refusal(scope["method"], scope["path"], dict(pairs))
        if len([name for name, _ in pairs if name in ("host", "origin")]) > 2:
            refused = 400, "A header occurs twice."

        async def answer(message: Messages) -> None:
            if message["type"] == "http.response.start":
                more = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        if refused is not None:
            await PlainTextResponse(refused[1], refused[0])(scope, receive, answer)
        else:
            if scope["path"].startswith(f"/{self._access.path}/"):
                scope[_ADMITTED] = True
            await self._app(scope, receive, answer)


class _Bounded(H11Protocol):
    """A connection that is closed if nothing is asked on it, or to make room for a newer one.

    Every user of the host can open connections. The oldest one without an admitted request makes
    room: idle connections then cannot keep others out, and a stream of the page is never closed.
    """

    silent_s = _SILENT_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a connection; if there are too many, close the oldest that shows nothing."""
        super().connection_made(transport)
        self.arrived_at = time.monotonic()
        if len(self.connections) > _MOST_CONNECTIONS:
            others = [each for each in self.connections if isinstance(each, _Bounded)]
            closable = [each for each in others if not each.is_admitted()]
            oldest = min(closable, key=lambda each: each.arrived_at)
            self.connections.discard(oldest)
            oldest.transport.abort()
        asyncio.get_running_loop().call_later(self.silent_s, self._ask)

    def is_admitted(self) -> bool:
        """Return whether a request that `Access` admits is being answered."""
        cycle = getattr(self, "cycle", None)
        return cycle is not None and not cycle.response_complete and _ADMITTED in cycle.scope

    def _ask(self) -> None:
        if getattr(self, "cycle", None) is None and not self.transport.is_closing():
            self.transport.abort()


def application(source: PageSource, access: Access) -> Callable[..., Awaitable[None]]:
    """Return the page as an application of ASGI."""
    static = {name: _file(name) for name in _STATIC}
    page, first = _file("page.html"), _file("open.html")

    async def open_first(_: Request) -> Response:
        return Response(first, media_type=_TYPES["html"])

    async def exchange(request: Request) -> Response:
        header = access.exchange(await _body(request))
        if header is None:
            return PlainTextResponse("This address has been used, or is incomplete.", 403)
        return JSONResponse({"path": f"/{access.path}/"}, headers={"Set-Cookie": header})

    async def show_static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in static:
            return PlainTextResponse("There is no such file.", 404)
        return Response(static[name], media_type=_TYPES[name.rpartition(".")[2]])

    async def show_page(_: Request) -> Response:
        return Response(page, media_type=_TYPES["html"])

    async def events(_: Request) -> Response:
        return _stream(source, _events(source))

    async def output(request: Request) -> Response:
        rank = request.query_params.get("rank", "0")
        number = int(rank) if rank.isascii() and rank.isdigit() else 0
        return _stream(source, _output(source, number))

    routes = [
        Route("/", open_first),
        Route("/session", exchange, methods=["POST"]),
        Route("/static/{name}", show_static),
        Route(f"/{access.path}/", show_page),
        Route(f"/{access.path}/events", events),
        Route(f"/{access.path}/output", output),
    ]
    return _Gate(Starlette(routes=routes), access)


def _file(name: str) -> bytes:
    return files("dure.viewer").joinpath("static", name).read_bytes()


async def _body(request: Request) -> str:
    """Return a short body; of a long one nothing."""
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > _LONGEST_TOKEN:
                return ""
    except ClientDisconnect:
        return ""
    return body.decode("ascii", "replace")


def _stream(source: PageSource, events: AsyncIterator[bytes]) -> Response:
    if source.num_readers >= LISTENERS:
        return PlainTextResponse("Too many browsers show this page.", 503)
    source.num_readers += 1
    return _Stream(events, source)


class _Stream(StreamingResponse):
    """A stream of events, whose end is noted however it comes."""

    def __init__(self, events: AsyncIterator[bytes], source: PageSource) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._source = source

    async def __call__(self, scope: Messages, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._source.num_readers -= 1


def _event(name: str, content: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(content))


async def _events(source: PageSource) -> AsyncIterator[bytes]:
    version = 0
    sent: dict[Key, tuple[int, int]] = {}
    while True:
        if await source.wait(version, _KEEP_ALIVE_S):
            version = source.version
            yield _event("view", source.view)
            yield _event("curves", _news(source, sent))
            if source.over:
                yield _event("over", None)
                return
            await asyncio.sleep(_EVERY_S)
        else:
            yield b":\n\n"


def _news(source: PageSource, sent: dict[Key, tuple[int, int]]) -> list[tuple[Any, ...]]:
    """Return the points that a reader does not have, and note that it will have them.

    A curve is (kind, name, rank, from which point on, x of each, y of each).
    """
    news: list[tuple[Any, ...]] = []
    for key, curve in source.charts.curves.items():
        generation, number = sent.get(key, (0, 0))
        start = number if generation == curve.generation else 0
        if start < len(curve.xs):
            news.append((*key, start, curve.xs[start:], curve.ys[start:]))
        sent[key] = curve.generation, len(curve.xs)
    return news


async def _output(source: PageSource, rank: int) -> AsyncIterator[bytes]:
    version = number = 0
    while True:
        if not await source.wait(version, _KEEP_ALIVE_S):
            yield b":\n\n"
            continue
        version = source.version
        lines = source.output.since(rank, number)
        if lines or number == 0:
            number = lines[-1][0] if lines else number
            yield _event("lines", [line[1:] for line in lines])
        if source.over:
            yield _event("over", None)
            return
        await asyncio.sleep(_EVERY_S)


async def serve(
    source: PageSource, access: Access, listening: socket.socket, silent_s: float = _SILENT_S
) -> None:
    """Serve a page until SIGINT, or until the task is cancelled.

    Args:
        source: The content.
        access: Checks who may see it.
        listening: Where it is asked for (`access.listen`).
        silent_s: A connection on which nothing is asked for so long is closed.
    """
    config = uvicorn.Config(
        application(source, access),
        http=type("_BoundedHere", (_Bounded,), {"silent_s": silent_s}),
        ws="none",
        loop="asyncio",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="critical",  # any user of the host can send nonsense; it must not fill a terminal
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=int(_SILENT_S),
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=1 << 14,
    )
    await uvicorn.Server(config).serve(sockets=[listening])
