"""A port that all hosts of a job compute alike, from nothing but the job's name.

A cluster names the first host but no port. Every host hashes the job's name into the range below,
which lies under the ports that Linux gives to outgoing connections (32768 and up) and above those
of well-known services. Two jobs on one host may get the same port, or it may be in use: then the
store cannot listen, and says so; DURE_STORE_PORT names another.
"""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["FIRST_PORT", "LAST_PORT", "derived_port"]

FIRST_PORT = 15_000
LAST_PORT = 29_000


def derived_port(job: str) -> int:
    """Return the port of the job called `job`."""
    digest = blake2b(job.encode(), digest_size=8, person=b"dure port").digest()
    return FIRST_PORT + int.from_bytes(digest, "big") % (LAST_PORT - FIRST_PORT + 1)
