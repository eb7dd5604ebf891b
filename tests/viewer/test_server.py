"""The server of a page: connections on which nothing is asked."""

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
