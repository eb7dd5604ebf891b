"""The server of a page: connections on which nothing is asked."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

from dure.viewer import access
from dure.viewer.server import serve
from dure.viewer.sources import Live
from tests.waiting import PATIENCE_S


def test_silent_connections_are_closed_and_others_served(tmp_path: Path) -> None:
    async def main(listening: socket.socket) -> tuple[list[bytes], bytes]:
        host, port = listening.getsockname()[:2]
        page = serve(Live("train.py", tmp_path), access.Access(), listening, silent_s=0.5)
        serving = asyncio.create_task(page)
        silent = [await asyncio.open_connection(host, port) for _ in range(100)]
        ends: list[bytes] = []
        for reader, _ in silent:  # the newest 64 when the time is up, the others at once
            try:
                ends.append(await reader.read(1))
            except ConnectionResetError:
                ends.append(b"")
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(f"GET / HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        answer = await reader.readline()
        for _, line in (*silent, (reader, writer)):
            line.close()
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        return ends, answer

    with access.listen() as listening:
        ends, answer = asyncio.run(asyncio.wait_for(main(listening), PATIENCE_S))
    assert ends == [b""] * 100
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_idle_connections_do_not_shut_the_page_for_others(tmp_path: Path) -> None:
    async def scenario(listening: socket.socket) -> None:
        made = access.Access()
        page = asyncio.create_task(serve(Live("train.py", tmp_path), made, listening))
        host, port = listening.getsockname()[:2]
        request = f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
        opened = [await asyncio.open_connection(host, port) for _ in range(400)]
        for number in (-1, -2):  # the newest two of the many ask
            opened[number][1].write(request)
            async with asyncio.timeout(PATIENCE_S):
                assert await opened[number][0].readline() == b"HTTP/1.1 200 OK\r\n"
        origin = f"Host: {host}\r\nOrigin: http://{host}\r\n"
        cookie = made.exchange(made.token)
        assert cookie is not None
        events = f"GET /{made.path}/events HTTP/1.1\r\n{origin}Cookie: {cookie}\r\n\r\n"
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(events.encode())
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        more = [await asyncio.open_connection(host, port) for _ in range(400)]
        more[-1][1].write(request)
        async with asyncio.timeout(PATIENCE_S):
            assert await more[-1][0].readline() == b"HTTP/1.1 200 OK\r\n"
            await reader.readuntil(b"event: view")  # the page's own stream is not closed for them
        page.cancel()
        await asyncio.gather(page, return_exceptions=True)
        for _, line in (*opened, *more, (reader, writer)):
            line.close()

    with access.listen() as listening:
        asyncio.run(scenario(listening))
