"""Korean pages whose English page changed later are listed (`scripts/translations`)."""

from pathlib import Path

import pytest

from tests.arch.sources import script

translations = script("scripts/translations")

# What `git hash-object` prints for "one\n" and "two\n".
ONE, TWO = "5626abf0f72e", "f719efd430d5"


@pytest.fixture(autouse=True)
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two translated pages, both up to date, and a page without an English one."""
    (tmp_path / "docs/ko").mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    for english, korean in (("README.md", "README.ko.md"), ("docs/ddp.md", "docs/ko/ddp.md")):
        (tmp_path / english).write_text("one\n")
        (tmp_path / korean).write_text("하나\n")
    (tmp_path / "docs/ko/words.md").write_text("낱말\n")
    table = tmp_path / "scripts/translations.txt"
    table.write_text(f"{ONE} README.ko.md\n{ONE} docs/ko/ddp.md\n")
    monkeypatch.setattr(translations, "ROOT", tmp_path)
    monkeypatch.setattr(translations, "TABLE", table)
    return tmp_path


def test_pages_that_agree_with_their_english_pages_are_not_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert translations.check() == 0
    assert capsys.readouterr() == ("", "")


def test_a_page_whose_english_page_changed_later_is_listed_as_a_warning(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "docs/ddp.md").write_text("two\n")
    assert translations.check() == 0
    assert capsys.readouterr().out == f"docs/ko/ddp.md is behind: git diff {ONE} docs/ddp.md\n"


def test_done_records_the_present_english_page_of_this_page_alone(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "docs/ddp.md").write_text("two\n")
    (tree / "README.md").write_text("two\n")
    assert translations.record(["docs/ko/ddp.md"]) == 0
    table = (tree / "scripts/translations.txt").read_text()
    assert table == f"{ONE} README.ko.md\n{TWO} docs/ko/ddp.md\n"
    assert translations.check() == 0
    assert capsys.readouterr().out == f"README.ko.md is behind: git diff {ONE} README.md\n"


def test_done_of_a_page_without_an_english_one_is_refused_and_records_nothing(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "docs/ddp.md").write_text("two\n")
    assert translations.record(["docs/ko/ddp.md", "docs/ko/words.md"]) == 2
    assert capsys.readouterr().err.split()[-1] == "docs/ko/words.md"
    table = (tree / "scripts/translations.txt").read_text()
    assert table == f"{ONE} README.ko.md\n{ONE} docs/ko/ddp.md\n"


def test_a_new_page_without_a_line_is_an_error(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "docs/fsdp.md").write_text("one\n")
    (tree / "docs/ko/fsdp.md").write_text("하나\n")
    assert translations.check() == 1
    assert capsys.readouterr().err.startswith("docs/ko/fsdp.md: ")


def test_a_line_without_a_page_is_an_error_until_the_next_record(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "docs/ko/ddp.md").unlink()
    assert translations.check() == 1
    assert capsys.readouterr().err.startswith("docs/ko/ddp.md: ")
    assert translations.record(["README.ko.md"]) == 0
    assert translations.check() == 0
