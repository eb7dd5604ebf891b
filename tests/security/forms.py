"""All ways to write a job's key, and the secret keys that are made from it, to search for them."""

import base64

from zmq.utils import z85

from dure.store import JobKey

__all__ = ["forms_of", "found_in"]


def forms_of(key: JobKey) -> dict[str, bytes]:
    """All ways to write the key, and the secret keys that are made from it."""
    secrets = {"key": key.raw}
    for purpose in ("store server", "store client"):
        secrets[purpose] = z85.decode(key.pair(purpose).secret)
    forms: dict[str, bytes] = {}
    for name, raw in secrets.items():
        forms |= {
            f"{name}, raw": raw,
            f"{name}, clamped": raw[1:-1],  # arithmetic on the curve changes the ends
            f"{name}, hex": raw.hex().encode(),
            f"{name}, HEX": raw.hex().upper().encode(),
            f"{name}, base64": base64.b64encode(raw).rstrip(b"="),
            f"{name}, base64 of URLs": base64.urlsafe_b64encode(raw).rstrip(b"="),
            f"{name}, Z85": z85.encode(raw),
            f"{name}, Python": repr(raw)[2:-1].encode(),
            f"{name}, decimal": b", ".join(b"%d" % byte for byte in raw),
        }
    return forms


def found_in(text: bytes, key: JobKey) -> list[str]:
    return [name for name, form in forms_of(key).items() if form in text]
