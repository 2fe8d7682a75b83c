"""Training that samples from SGLang servers: what samples is what was trained."""

import asyncio
import os
from pathlib import Path

import pytest
from peft import LoraConfig

from covey.engines.servers.server_process import LaunchFailed
from tests.support import runs, tiny
from tests.support.servers.sglang_servers import FAKE, InThread, greedy, request


@pytest.fixture
def server(tiny_folder):
    made = []

    def make(*options):
        made.append(InThread(tiny_folder, *options))
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.fixture
def train(tmp_path, tiny_folder):
    """Makes trainers whose engines end with the test."""
    made = []

    def make(parts=None, **settings):
        given = {"use_sglang": True, "temperature": 0.9, "loss_type": "dapo", **settings}
        made.append(runs.trainer(tmp_path, parts={"model": tiny_folder, **(parts or {})}, **given))
        return made[-1]

    yield make
    for one in made:
        one.collector.engine.close()


def continuation(engine):
    [completion] = asyncio.run(engine.generate(request(n=1, max_tokens=10, temperature=0.0)))
    return completion.token_ids


@pytest.mark.slow
def test_the_server_samples_from_what_was_trained(server, train, tmp_path):
    trainer = train(
        sglang_base_url=server().url, sglang_weight_transfer="disk", checkpoint_path=str(tmp_path / "way"), max_steps=3
    )
    trainer.train()
    ratios = runs.history(trainer, "sampling/importance_sampling_ratio/mean")
    assert len(ratios) == 3 and all(abs(ratio - 1) < 1e-3 for ratio in ratios)
    assert len(runs.history(trainer, "sync/seconds")) == 3
    trainer.weight_sync.ensure_current(trainer.state.global_step)
    policy = trainer.model.eval()
    assert (
        continuation(trainer.collector.engine) == greedy(policy, [5, 6, 7], 10) != greedy(tiny.model(), [5, 6, 7], 10)
    )


@pytest.mark.slow
def test_an_adapter_is_trained_and_sent_alone(server, train):
    running = server("--enable-lora")
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    trainer = train({"peft_config": config}, sglang_base_url=running.url, learning_rate=0.1, max_steps=3)
    trainer.train()
    trainer.weight_sync.ensure_current(trainer.state.global_step)
    assert continuation(trainer.collector.engine) == greedy(trainer.model.eval(), [5, 6, 7], 10)
    paths = running.paths()
    assert paths.count("/load_lora_adapter_from_tensors") == 4 and "/update_weights_from_disk" not in paths


@pytest.mark.slow
def test_stale_weights_are_found_out_at_the_start(server, train, monkeypatch):
    """The server says that it has taken the weights, and has not."""
    running = server()
    monkeypatch.setattr(running.server.weights, "load", lambda named: running.server.weights.loaded.update(dict(named)))
    trainer = train({"model": tiny.model(seed=5)}, sglang_base_url=running.url, sglang_weight_transfer="disk")
    with pytest.raises(ValueError, match="weights that never arrived"):
        trainer.train()


# ---- a server of the run's own ---------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package named sglang whose server is the fake."""
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    start = package / "launch_server.py"
    start.write_text(
        f"import sys\nsys.path.insert(0, {str(FAKE.parents[3])!r})\n"
        "from tests.support.servers import fake_sglang\nfake_sglang.main(sys.argv[1:])\n"
    )
    source = Path(runs.__file__).parents[2] / "src"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), str(source)]))
    return start


@pytest.mark.slow
def test_a_server_is_started_trained_with_and_ended(installed, train):
    config = LoraConfig(r=4, target_modules=["q_proj"])
    trainer = train(
        {"peft_config": config}, sglang_device="cpu", sglang_server_args={"context_length": 128}, max_steps=1
    )
    trainer.train()
    log = Path(trainer.args.output_dir) / "sglang-server.log"
    assert log.is_file()
    assert trainer.collector.engine._max_context == 128  # the flag got through
    command = [path for path in Path("/proc").glob("[0-9]*/cmdline") if _says(path, "sglang.launch")]
    assert command and not any(_says(path, "--api-key") for path in command)  # the key is not for everyone to read
    trainer.collector.engine.close()
    del trainer


def _says(path, word):
    try:
        return word in path.read_text().replace("\0", " ")
    except OSError:
        return False


def test_a_server_that_does_not_start_fails_with_its_log(installed, train):
    installed.write_text("print('no GPU with enough memory')\nraise SystemExit(3)\n")
    with pytest.raises(LaunchFailed, match=r"(?s)exit status 3 before it was ready.*no GPU with enough memory"):
        train(sglang_device="cpu")


def test_a_model_without_a_name_cannot_be_served(train):
    with pytest.raises(ValueError, match="made in memory: save it"):
        train({"model": tiny.model()}, sglang_device="cpu")


def test_a_device_that_is_none_is_refused(train):
    with pytest.raises(ValueError, match="write cuda:1, or cpu"):
        train(sglang_device="gpu7")
