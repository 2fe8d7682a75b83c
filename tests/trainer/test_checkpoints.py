"""Checkpoints that are damaged are found before they are loaded, and what interrupts a run costs nothing."""

import dataclasses
import errno
import io
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig
from transformers import TrainerCallback

from covey.runtime import data_files
from covey.runtime.files import MANIFEST, seal
from covey.trainer import checkpoint
from tests.support import runs, tiny

SAVING = {"save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of three steps, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("saved")
    straight = runs.trainer(folder, **SAVING, max_steps=3)
    straight.train()
    return folder, runs.weights(straight)


@pytest.fixture
def run(saved, tmp_path):
    """A copy of it whose last checkpoint is step 2's."""
    shutil.copytree(saved[0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-3")
    return tmp_path / "run"


def resume(folder, wanted, **changes):
    resumed = runs.trainer(folder, **{"max_steps": 3, **changes})
    resumed.train(resume_from_checkpoint=wanted)
    return resumed


def same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


FILES = (
    "model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "covey_state_0.pt",
    "trainer_state.json",
    "config.json",
)
HARMS = {"missing": Path.unlink, "empty": lambda path: path.write_bytes(b""), "half": cut, "flipped": flip}


@pytest.mark.parametrize(
    ("name", "harm"),
    [(name, harm) for name in (*FILES, MANIFEST) for harm in HARMS if (name, harm) != (MANIFEST, "missing")],
)
def test_a_damaged_file_is_named_and_another_offered(run, name, harm):
    HARMS[harm](run / "checkpoint-2" / name)
    with pytest.raises(ValueError, match=r"checkpoint-2' is damaged: .*Resume from '.*checkpoint-1'") as said:
        resume(run, True)
    assert name in str(said.value)


@pytest.mark.slow
def test_auto_takes_the_last_whole_checkpoint_and_goes_on(run, saved):
    flip(run / "checkpoint-2" / "optimizer.pt")
    with pytest.warns(UserWarning, match=r"checkpoint-2' is damaged: .*continues from '.*checkpoint-1'"):
        resumed = resume(run, "auto", **SAVING)
    assert resumed._initial_global_step == 1
    assert same(runs.weights(resumed), saved[1])


@pytest.mark.slow
def test_auto_begins_where_nothing_is_saved_yet(tmp_path, saved):
    begun = resume(tmp_path, None, resume_from_checkpoint="auto", **SAVING)
    assert same(runs.weights(begun), saved[1])


def test_auto_does_not_begin_over_damaged_checkpoints(run):
    for step in (1, 2):
        cut(run / f"checkpoint-{step}" / "model.safetensors")
    with pytest.raises(ValueError, match=r"checkpoint-2' is damaged: .* holds no other that is whole"):
        resume(run, "auto")


def test_a_checkpoint_of_before_manifests_resumes(run, saved):
    (run / "checkpoint-2" / MANIFEST).unlink()
    assert same(runs.weights(resume(run, True)), saved[1])


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_without_a_manifest_a_lost_file_is_named(run, name):
    for lost in (MANIFEST, name):
        (run / "checkpoint-2" / lost).unlink()
    with pytest.raises(ValueError, match=rf"checkpoint-2' is damaged: {name} is missing"):
        resume(run, True)


@pytest.mark.parametrize("name", ["covey_state_1.pt", "rng_state_0.pth"])
def test_a_lost_file_of_one_process_is_named(tmp_path, name):
    of_each = "covey_state_0.pt covey_state_1.pt rng_state_0.pth rng_state_1.pth"
    for file in ("optimizer.pt", "scheduler.pt", *of_each.split()):
        (tmp_path / file).touch()
    assert checkpoint._missing(tmp_path) is None
    (tmp_path / name).unlink()
    assert checkpoint._missing(tmp_path) == f"{name} is missing"


@pytest.mark.parametrize("name", ["covey_state_0.pt", "optimizer.pt"])
def test_objects_that_could_run_code_are_not_loaded(run, tmp_path, name):
    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    torch.save({"state": Runs()}, run / "checkpoint-2" / name)
    seal(run / "checkpoint-2")
    with pytest.raises(ValueError, match="the checkpoint has Python objects other than tensors and numbers"):
        resume(run, True)
    assert not (tmp_path / "made").exists()


class Makes:
    """Unpickling it makes a folder."""

    def __init__(self, place):
        self.place = str(place)

    def __reduce__(self):
        return os.mkdir, (self.place,)


@pytest.fixture
def shards(tmp_path):
    """What FSDP writes of an optimizer by default."""
    dcp.save({"a": torch.arange(3.0), "step": {"n": 2}}, checkpoint_id=tmp_path / "shards", no_dist=True)
    return tmp_path / "shards"


def load_shards(folder):
    state = {"a": torch.zeros(3), "step": {"n": 0}}
    with data_files.refusing_objects(), data_files.loading_data_alone(str(folder)):
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def test_shards_are_loaded_as_data(shards, monkeypatch):
    monkeypatch.setenv(data_files.WEIGHTS_ONLY, "0")
    loaded = load_shards(shards)
    assert loaded["a"].tolist() == [0.0, 1.0, 2.0] and loaded["step"] == {"n": 2}
    assert os.environ[data_files.WEIGHTS_ONLY] == "0"


@pytest.mark.parametrize(
    ("module", "name"),
    [("os", "mkdir"), ("torch.distributed.checkpoint.metadata", "os.mkdir"), ("torch", "serialization.os.mkdir")],
)
def test_a_description_of_shards_that_calls_is_refused(shards, tmp_path, module, name):
    """torch reads it by `pickle.load`; names may reach into other modules."""
    place = str(tmp_path / "made")
    words = b"".join(b"\x8c" + bytes([len(one)]) + one.encode() for one in (module, name))
    content = b"\x80\x04" + words + b"\x93\x8c" + bytes([len(place)]) + place.encode() + b"\x85R."
    (shards / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match="the checkpoint has Python objects other than tensors and numbers"):
        load_shards(shards)
    assert not (tmp_path / "made").exists()


def test_an_object_within_shards_is_refused(shards, tmp_path):
    """torch asks itself for any object there, where it is no tensor."""
    with (shards / ".metadata").open("rb") as file:
        described = pickle.load(file)
    (index, info), *_ = [pair for pair in described.storage_data.items() if pair[0].fqn == "step.n"]
    path = shards / info.relative_path
    torch.save(Makes(tmp_path / "made"), data := io.BytesIO())
    described.storage_data[index] = dataclasses.replace(info, offset=path.stat().st_size, length=data.tell())
    with path.open("ab") as file:
        file.write(data.getvalue())
    (shards / ".metadata").write_bytes(pickle.dumps(described))
    with pytest.raises(ValueError, match="the checkpoint has Python objects other than tensors and numbers"):
        load_shards(shards)
    assert not (tmp_path / "made").exists()


def test_other_things_under_names_of_checkpoints_do_no_harm(run, saved):
    """A folder of an odd number, an empty one, a file, and files where folders are to be made."""
    shutil.copytree(run / "checkpoint-1", run / "checkpoint-²")
    (run / "checkpoint-9").mkdir()
    for name in ("checkpoint-3", "checkpoint-8", ".saving"):
        (run / name).write_text("")
    shutil.rmtree(run / "record")
    (run / "record").write_text("")
    with pytest.warns(UserWarning, match="could not be written into"):
        resumed = resume(run, True, **SAVING)
    assert same(runs.weights(resumed), saved[1]) and (run / "checkpoint-3" / MANIFEST).exists()


def test_a_link_that_leads_nowhere_gives_way_to_a_checkpoint(run, saved):
    (run / "checkpoint-3").symlink_to(run / "moved")
    resumed = resume(run, "auto", **SAVING)
    assert same(runs.weights(resumed), saved[1])
    assert (run / "checkpoint-3" / MANIFEST).exists() and not (run / "checkpoint-3").is_symlink()


def test_a_full_disk_keeps_the_earlier_final_model(tmp_path):
    trainer = runs.trainer(tmp_path)
    trainer.save_model()
    names, before = sorted(os.listdir(tmp_path)), (tmp_path / "model.safetensors").read_bytes()
    trainer.model.lm_head.weight.data[0, 0] += 1

    def save(folder, **kwargs):
        Path(folder, "model.safetensors").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    trainer.model.save_pretrained = save
    with pytest.raises(
        OSError, match=r"the model could not be written into .*: the disk is full\. What is there is as"
    ):
        trainer.save_model()
    assert (tmp_path / "model.safetensors").read_bytes() == before and sorted(os.listdir(tmp_path)) == names


def test_files_of_a_killed_save_are_not_published(tmp_path):
    stale = tmp_path / ".saving" / "checkpoint-1"
    stale.mkdir(parents=True)
    for name in ("adapter_config.json", "optimizer.pt"):
        (stale / name).write_text("")
    runs.trainer(tmp_path, **SAVING, max_steps=1, save_only_model=True).train()
    names = os.listdir(tmp_path / "checkpoint-1")
    assert MANIFEST in names and not {"adapter_config.json", "optimizer.pt"} & set(names)


def test_a_link_in_place_of_unfinished_checkpoints_is_removed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".saving").symlink_to(tmp_path / "elsewhere")
    runs.trainer(tmp_path / "run", **SAVING, max_steps=1).train()
    assert (tmp_path / "run" / "checkpoint-1" / MANIFEST).exists()
    assert not any(tmp_path.glob("run/.saving")) and not any((tmp_path / "elsewhere").iterdir())


@pytest.mark.slow
def test_a_checkpoint_that_is_being_deleted_looks_like_none(tmp_path, monkeypatch):
    seen = []
    remove = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path, **how: (seen.append(os.listdir(tmp_path)), remove(path, **how)))
    runs.trainer(tmp_path, **SAVING, max_steps=3, save_total_limit=1).train()
    found = [sorted(name for name in names if name.startswith("checkpoint")) for names in seen]
    # Folders are deleted before and after each of three saves; the older checkpoint has its name no more.
    assert found == [[], ["checkpoint-1"], ["checkpoint-1"], ["checkpoint-2"], ["checkpoint-2"], ["checkpoint-3"]]


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_costs_nothing(small_disk, tmp_path, saved):
    filling = small_disk / "else.bin"
    filling.write_bytes(bytes(900_000))  # room for one checkpoint
    with pytest.raises(OSError, match=r"checkpoint-2 could not be written into .*: the disk is full\. Earlier"):
        runs.trainer(small_disk / "run", **SAVING, max_steps=3, log_completions=False).train()
    assert sorted(path.name for path in (small_disk / "run").glob("*")) == ["checkpoint-1", "record"]
    filling.unlink()
    shutil.copytree(small_disk / "run", tmp_path / "run")
    assert same(runs.weights(resume(tmp_path / "run", "auto")), saved[1])


class BecomesReadOnly(TrainerCallback):
    """Mounts a folder over itself, read-only, before the second step: it may have open files."""

    def __init__(self, folder):
        self.folder = folder

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            subprocess.run(["mount", "--bind", self.folder, self.folder], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", self.folder], check=True)


@pytest.mark.slow
def test_a_disk_that_becomes_read_only_is_named(small_disk, tmp_path, saved):
    """Logs and records do without it; a checkpoint ends the run."""
    folder = small_disk / "run"
    asked = runs.trainer(folder, parts={"callbacks": [BecomesReadOnly(folder)]}, **SAVING, max_steps=3)
    wanted = (
        r"checkpoint-2 could not be written into '.*run': the file system is read-only\. Earlier .*: make it writable"
    )
    try:
        with pytest.warns(UserWarning, match="Read-only") as warned, pytest.raises(OSError, match=wanted):
            asked.train()
    finally:
        subprocess.run(["umount", folder], check=True)
    refused = [str(one.message) for one in warned if "Read-only" in str(one.message)]
    assert [text.partition(" of step")[0] for text in refused] == ["the record"]
    shutil.copytree(folder, tmp_path / "run")
    assert same(runs.weights(resume(tmp_path / "run", "auto")), saved[1])


def test_a_read_only_disk_is_said_before_training(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(ValueError, match=r"output_dir='.*run' is not a folder that can be written to"):
        runs.trainer(small_disk / "some" / "run", **SAVING)


def adapter(*targets, **settings):
    return LoraConfig(r=4, target_modules=list(targets), **settings)


@pytest.mark.parametrize(
    ("began", "goes_on"),
    [
        ({}, {"model": tiny.model(num_hidden_layers=3)}),
        ({}, {"model": tiny.model(num_hidden_layers=1)}),
        ({}, {"model": tiny.model(tie_word_embeddings=False)}),
        ({"peft_config": adapter("q_proj", "v_proj")}, {"peft_config": adapter("k_proj", "v_proj")}),
        ({"peft_config": adapter("q_proj")}, {"peft_config": adapter("q_proj", use_dora=True)}),
    ],
    ids=["more layers", "fewer layers", "untied head", "other modules", "DoRA"],
)
def test_a_model_with_other_weights_is_refused(tmp_path, began, goes_on):
    """Loading leaves out what only one of two models has."""
    runs.trainer(tmp_path, parts=began, **SAVING, max_steps=1).train()
    with pytest.raises(
        ValueError, match=r"checkpoint-1' belong to a different model: .* trained weights are in only one of"
    ):
        runs.trainer(tmp_path, parts=goes_on, max_steps=2).train(resume_from_checkpoint="auto")


def test_a_checkpoint_of_other_sharding_is_refused(run):
    path = run / "checkpoint-2" / checkpoint.STATE_FILE.format(rank=0)
    torch.save({**torch.load(path, weights_only=True), "sharding": "FSDP2"}, path)
    (run / "checkpoint-2" / MANIFEST).unlink()
    with pytest.raises(ValueError, match="was saved under FSDP2, and this run has whole weights in each process"):
        resume(run, True)


def test_a_second_run_in_the_folder_is_refused(tmp_path):
    code = "import sys, time; from pathlib import Path; from covey.runtime.files import locked\n"
    code += "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"in use by process {other.pid}"):
            runs.trainer(tmp_path).train()
        other.kill()
    runs.trainer(tmp_path).train()


def test_the_scale_of_a_run_in_fp16_is_left_where_none_is_used(run, saved):
    torch.save({"scale": 65536.0}, run / "checkpoint-2" / "scaler.pt")
    (run / "checkpoint-2" / MANIFEST).unlink()
    assert same(runs.weights(resume(run, True)), saved[1])


def test_the_state_of_a_step_copies_no_tensors(tmp_path):
    """It is taken after each optimizer step, for a run that is stopped in its next one."""
    follows = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}
    run = runs.trainer(tmp_path, **follows, num_iterations=2, max_steps=1)
    run.train()
    state = run.checkpoints.method_state()
    reference = dict(run.reference.copy.named_parameters())
    assert all(state["behaviour"]["reference"][name].data_ptr() == one.data_ptr() for name, one in reference.items())
    (left,) = run.updates.buffer.batches
    assert state["updates"]["buffer"]["batch"]["token_ids"] is left.own.batch.token_ids


def test_a_rollout_batch_that_was_trained_on_is_in_no_state(tmp_path):
    run = runs.trainer(tmp_path, max_steps=1)
    run.train()
    assert run.updates.buffer.left == 0 and run.checkpoints.method_state()["updates"]["buffer"]["batch"] is None
