"""Storages in folders: what they accept before anything is read or written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dure.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from dure.checkpoint.staging import AsyncStager, BlockingAsyncStager


@pytest.mark.parametrize(
    "kind",
    [FileSystemReader, FileSystemWriter, HuggingFaceStorageReader, HuggingFaceStorageWriter],
)
def test_a_folder_can_be_a_checkpoint_and_an_address_cannot(kind: type, tmp_path: Path) -> None:
    assert kind.validate_checkpoint_id(tmp_path / "new")
    assert kind.validate_checkpoint_id(str(tmp_path))
    assert not kind.validate_checkpoint_id("s3://bucket/folder")


def test_a_staged_state_does_not_see_later_writes() -> None:
    stager: AsyncStager = BlockingAsyncStager()
    state = {"weight": torch.ones(2), "steps": [1, 2]}
    staged = stager.stage(state)
    stager.synchronize_staging()
    state["weight"].zero_()
    state["steps"].append(3)
    assert staged["weight"].tolist() == [1, 1]
    assert staged["steps"] == [1, 2]
    stager.close()
