"""CRC-32C against published sums: the engine's, and the one where there is no engine."""

import pytest

from dure import native
from dure.native import _absent

VECTORS = [  # RFC 3720, appendix B.4; and the check value of the catalogue of such algorithms
    (b"", 0),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (b"123456789", 0xE3069283),
]


@pytest.mark.parametrize("crc32c", [native.crc32c, _absent.crc32c], ids=["engine", "absent"])
def test_published_sums(crc32c):
    for data, wanted in VECTORS:
        assert crc32c(data) == wanted
        assert crc32c(memoryview(data)[3:], crc32c(data[:3])) == wanted


def test_both_agree_beyond_the_lanes():
    data = bytes(i * i % 251 for i in range(50001))
    assert native.crc32c(data) == _absent.crc32c(data)


def test_what_is_no_buffer_is_refused():
    with pytest.raises(TypeError):
        native.crc32c("text")  # pyright: ignore[reportArgumentType]
