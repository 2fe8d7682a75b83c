"""Folders of weights: where they lie, that they are removed, and what is said when they cannot be written."""

import gc

import pytest

from covey.engines.servers.weights import files
from covey.engines.servers.weights.files import CheckpointDir, read_folder
from tests.support import tiny
from tests.support.servers.sglang_servers import update


def test_a_folder_is_written_in_its_parent_and_read_back(tmp_path):
    model, found = tiny.model(), {}
    shelf = CheckpointDir(str(tmp_path))
    folder = shelf.write(update(model, 3), "v3", 2**20)
    assert folder.parent.parent == tmp_path and folder.parent.name.startswith("covey-weights-")
    read_folder(folder, found.update)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: parameter.tolist() for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("given", [True, False])
def test_a_collected_checkpoint_dir_leaves_no_files(tmp_path, given):
    shelf = CheckpointDir(str(tmp_path) if given else None)
    path = shelf.path
    shelf.write(update(tiny.model(), 0), "v0", 2**20)
    del shelf
    gc.collect()
    assert not path.exists()


def test_after_it_was_cleared_it_can_be_used_again(tmp_path):
    shelf = CheckpointDir(str(tmp_path))
    shelf.write(update(tiny.model(), 0), "v0", 2**20)
    shelf.clear()
    assert not list(tmp_path.iterdir())
    assert shelf.write(update(tiny.model(), 1), "v1", 2**20).exists()


def test_an_unwritable_folder_is_named_with_advice(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RuntimeError, match=rf"cannot be written to {tmp_path}/file .*Not a dir.*vllm_weight_folder"):
        CheckpointDir(str(tmp_path / "file")).write(update(tiny.model(), 0), "v0", 2**20)


def test_a_full_disk_is_said_with_the_size_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    shelf, weights = CheckpointDir(str(tmp_path)), update(tiny.model(), 0)
    monkeypatch.setattr(files.json, "dumps", full)  # the last file of the folder no longer fits
    with pytest.raises(RuntimeError, match=r"v0 \(.*No space left on device\)\. They are [\d.]+ MiB\. Make room"):
        shelf.write(weights, "v0", 2**20)
    assert not list(shelf.path.iterdir())
