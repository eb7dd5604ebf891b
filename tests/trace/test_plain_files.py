"""Files that are read completely: what is not read, and where JSON is wrong."""

import json
import os

import pytest

from dure.trace.plain_files import NotAFile, open_plain, parse_json, read_plain


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path, kind in (
        (tmp_path / "pipe", "a pipe"),  # whose opening would wait for a writer
        (tmp_path / "zero", "a device"),
        (tmp_path, "a folder"),
    ):
        with pytest.raises(NotAFile) as caught:
            open_plain(path)
        assert caught.value.strerror == f"is not a regular file but {kind}"
    with pytest.raises(FileNotFoundError):
        open_plain(tmp_path / "absent")


def test_link_is_followed_where_the_caller_allows(tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    assert read_plain(tmp_path / "link", 4) == b"text"
    with pytest.raises(NotAFile):
        read_plain(tmp_path / "link", 4, follow=False)


def test_file_that_is_larger_than_expected_is_refused(tmp_path):
    (tmp_path / "file").write_text("12345")
    assert read_plain(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="is larger than 4 bytes"):
        read_plain(tmp_path / "file", 4)
    os.truncate(tmp_path / "file", (2 << 20) + 1)
    with pytest.raises(OSError, match="is larger than 2 MiB"):
        read_plain(tmp_path / "file", 2 << 20)


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ('{"a": 1,\n "b" 2}', 2, 6),
        ('{"a": 1,\n "b": 1e400}', 2, 7),
        ('{"a": 1,\n "b": -1e400}', 2, 7),
        ('{"a": NaN}', 1, 7),
        ("[" * 100_000, 1, 1),
    ],
)
def test_place_of_what_is_not_json_is_known(text, line, column):
    with pytest.raises(json.JSONDecodeError) as caught:
        parse_json(text.encode())
    assert (caught.value.lineno, caught.value.colno) == (line, column)
