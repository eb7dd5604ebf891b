"""The process that serves a run's page: `python -m dure.viewer FOLDER LISTENING_DESCRIPTOR`.

It has nothing of the launcher's but the listening socket and its standard input, on which come the
token and the title, a line of JSON, and then what happens (`Feed`), a line each. At the end of the
input the page has its last state, which it still serves to readers; then it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from pathlib import Path

import msgspec

from dure.viewer.access import Access
from dure.viewer.server import serve
from dure.viewer.sources import Live
from dure.viewer.view import Feed

_LONGEST_FEED = 1 << 24
_LOOK_S = 1.0
_LAST_S = 1.5
"""How long browsers have to take the last state."""


async def _follow(reader: asyncio.StreamReader, source: Live) -> None:
    """Take the launcher's messages until its input ends."""
    decoder = msgspec.json.Decoder(Feed)
    while line := await reader.readline():
        with contextlib.suppress(msgspec.DecodeError):  # it has ended within a line
            source.feed(decoder.decode(line))


async def _look(source: Live) -> None:
    while True:
        source.look()
        await asyncio.sleep(_LOOK_S)


async def _run(folder: Path, listening: socket.socket) -> None:
    reader = asyncio.StreamReader(limit=_LONGEST_FEED)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    token, title = msgspec.json.decode(await reader.readline(), type=tuple[str, str])
    source = Live(title, folder)
    serving = asyncio.create_task(serve(source, Access(token=token), listening))
    looking = asyncio.create_task(_look(source))
    await _follow(reader, source)
    looking.cancel()
    source.end()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_S):
            while source.num_readers:
                await asyncio.sleep(0.05)
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def main() -> None:
    """Serve until the launcher has ended."""
    os.nice(10)  # ranks come first
    folder, descriptor = Path(sys.argv[1]), int(sys.argv[2])
    with socket.socket(fileno=descriptor) as listening:
        asyncio.run(_run(folder, listening))


if __name__ == "__main__":
    main()
