"""Where checkpoints are: a relative folder is that of the call; what cannot be one is refused."""

import pytest
import torch

import dure
from dure.checkpoint import (
    Checkpointer,
    CheckpointException,
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    async_save,
    load,
    local_files,
    save,
)
from dure.checkpoint.state_dict import get_optimizer_state_dict
from dure.errors import CheckpointError, CheckpointNotWritten, UsageError
from tests.checkpoint.saved_states import counted
from tests.thread_ranks import on_ranks
from tests.waiting import PATIENCE_S


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Begin in a folder; return a function that changes to another one."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return lambda: monkeypatch.chdir(tmp_path / "there")


def _is_counted(folder, reader=None):
    state = {"w": torch.zeros(3)}
    load(state, checkpoint_id=None if reader else folder, storage_reader=reader)
    return state["w"].tolist() == [0, 1, 2]


def test_a_checkpointer_stays_in_its_folder_when_the_program_changes_to_another(
    tmp_path, elsewhere
):
    checkpoints, values = Checkpointer("run"), [1]
    checkpoints.save(1, values=values)
    elsewhere()
    assert checkpoints.load(values=values) == 1
    path = checkpoints.save(2, values=values)
    assert path == tmp_path / "here" / "run" / "000002-step-2"
    assert list((tmp_path / "there").iterdir()) == []


def test_a_save_in_the_background_goes_to_the_folder_of_the_call(tmp_path, elsewhere, monkeypatch):
    write = local_files.write_all

    def after_the_change(*args):
        elsewhere()
        write(*args)

    monkeypatch.setattr(local_files, "write_all", after_the_change)
    future = async_save({"w": counted(3)}, checkpoint_id="last")
    future.result(PATIENCE_S)
    assert _is_counted(tmp_path / "here" / "last")


def test_a_url_is_named_as_it_was_given():
    with pytest.raises(UsageError, match="none://bucket/run"):
        save({}, storage_writer=FileSystemWriter("none://bucket/run"))
    with pytest.raises(UsageError, match="memory://run"):  # ranks write to the same files
        save({}, storage_writer=HuggingFaceStorageWriter("memory://run"))


@pytest.mark.parametrize("below", ["", "run"])
def test_a_link_to_nothing_is_named_and_is_no_empty_folder(tmp_path, below):
    (tmp_path / "link").symlink_to("/not/mounted")
    folder, named = tmp_path / "link" / below, "link to /not/mounted"
    with pytest.raises(CheckpointException, match=named):
        save({"w": counted(3)}, checkpoint_id=folder)
    with pytest.raises(CheckpointException, match=named):
        load({"w": counted(3)}, checkpoint_id=folder)
    with pytest.raises(CheckpointNotWritten, match=named):
        Checkpointer(folder).save(1, values=[])
    with pytest.raises(CheckpointError, match=named):
        Checkpointer(folder).load(values=[])


@pytest.mark.parametrize("store", [save, async_save, load])
@on_ranks(2)
def test_a_sharded_optimizer_itself_is_refused_with_the_call_that_works(rank, tmp_path, store):
    del rank
    model = torch.nn.Linear(2, 2)
    optimizer = dure.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    if store is load:
        states = {"o": get_optimizer_state_dict(model, optimizer)}
        save(states, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointException, match="get_optimizer_state_dict"):
        store({"o": optimizer}, checkpoint_id=tmp_path)


@pytest.mark.parametrize(
    "kind",
    [FileSystemReader, FileSystemWriter, HuggingFaceStorageReader, HuggingFaceStorageWriter],
)
def test_a_folder_can_be_a_checkpoint_and_an_unknown_address_cannot(kind, tmp_path):
    assert kind.validate_checkpoint_id(tmp_path / "new")
    assert kind.validate_checkpoint_id(str(tmp_path))
    assert not kind.validate_checkpoint_id("none://bucket/folder")
    is_weights = kind is HuggingFaceStorageWriter
    assert kind.validate_checkpoint_id("memory://bucket/folder") is not is_weights
