"""Some ranks of row 1, which meet in a store server on loopback: `NUM FIRST WORLD_SIZE PORT`.

Each rank is a thread with a connection of its own. The process prints a line when it is ready,
starts its ranks at a line of its input, and prints the time when the last of them has met the
others, by the clock that all processes of a host share.
"""

from __future__ import annotations

import sys
import threading
import time

from counting import PATIENCE

from dure.store import TCPStore
from dure.store.rendezvous import rendezvous


def main() -> None:
    """Be ranks `FIRST` to `FIRST + NUM - 1`."""
    num, first, world_size, port = map(int, sys.argv[1:])
    threading.stack_size(1 << 20)
    met = [0.0] * num
    all_met = threading.Barrier(num)

    def be(index: int) -> None:
        store = TCPStore("127.0.0.1", port, world_size, is_master=False, timeout=PATIENCE)
        rendezvous(None, first + index, world_size, store, PATIENCE)
        met[index] = time.monotonic()
        all_met.wait()

    threads = [threading.Thread(target=be, args=(index,)) for index in range(num)]
    print(flush=True)
    sys.stdin.readline()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(max(met), flush=True)


if __name__ == "__main__":
    main()
