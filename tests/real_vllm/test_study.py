"""A study whose variants are sampled by one real server, each from its own adapter."""

import json
import os
import signal
from typing import Any

import pytest

from covey_tools.study.study import Study
from tests.real_vllm.serving import serve
from tests.real_vllm.test_server_training import SETTINGS, digits
from tests.support import tiny

pytestmark = pytest.mark.vllm

VARIANTS: dict[str, dict[str, Any]] = {
    "slow": {"learning_rate": 1e-5},
    "fast": {"learning_rate": 1e-2},
    "small": {"learning_rate": 1e-2, "peft": {"r": 2}, "beta": 0.1},
    "rloo": {"learning_rate": 1e-2, "method": "rloo"},
}


def make_study(server, folder, variants: dict[str, Any] = VARIANTS, **changes: Any) -> Study:
    settings = {name: value for name, value in SETTINGS.items() if name not in ("save_strategy", "disable_tqdm")}
    place = {"vllm_server_base_url": server.url, "output_dir": str(folder), "max_steps": 4, **changes}
    adapter = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    return Study(server.model, variants, {**settings, **place, "peft": adapter}, digits, tiny.rows(), tiny.rows())


def differences(study: Study) -> dict[str, float]:
    """Largest mean difference of log-probs between server and trainer, of each variant."""
    name, found = "sampling/sampling_logp_difference/mean", {}
    for variant in study.variants:
        state = json.loads((study.folder / study.variants[variant].checkpoint / "trainer_state.json").read_text())
        found[variant] = max(entry[name] for entry in state["log_history"] if name in entry)
    return found


def test_each_variant_is_sampled_from_its_own_adapter(server, tmp_path):
    study = make_study(server, tmp_path, max_steps=16)
    study.train()
    assert {v.status: v.reason for v in study.variants.values()} == {"finished": ""}
    assert max(differences(study).values()) < 1e-3, "another variant's adapter would be far off"
    rewards = {name: sum(point["reward"] for point in v.curve[-4:]) / 4 for name, v in study.variants.items()}
    assert rewards["fast"] > rewards["slow"] + 0.1, rewards


def test_an_adapter_that_the_server_refuses_ends_alone(server, tmp_path):
    study = make_study(server, tmp_path, {"large": {"peft": {"r": 64}}, "fits": {}}, max_steps=2)
    study.train()
    assert study.variants["large"].status == "failed" and "rank" in study.variants["large"].reason
    assert study.variants["fits"].status == "finished", study.variants["fits"].reason


def test_a_server_that_is_started_again_is_sent_all_adapters(start_server, tmp_path):
    running = start_server("--enable-lora", "--max-lora-rank", "8")
    study = make_study(running, tmp_path, max_steps=3, vllm_server_timeout=400.0)
    play, again = study.play_round, []

    def round_() -> None:
        if study.round == 1:
            os.kill(running.process.pid, signal.SIGKILL)
            port = int(running.url.rpartition(":")[2])
            flags = ("--enable-lora", "--max-lora-rank", "8")
            again.append(serve(tmp_path, running.model, *flags, port=port))
        play()

    study.play_round = round_  # type: ignore[method-assign]
    try:
        study.train()
    finally:
        again[0].process.stop()
    assert {v.status: v.reason for v in study.variants.values()} == {"finished": ""}
    assert max(differences(study).values()) < 1e-3


def test_a_server_without_adapters_is_named_at_once(start_server, tmp_path):
    with pytest.raises(ValueError, match=r"takes no adapters.*--enable-lora --max-lora-rank R --max-loras 4"):
        make_study(start_server(), tmp_path)
