"""`covey env` says what a bug report needs."""

import torch

from covey.cli.env import memory_bytes
from covey.cli.main import main


def test_versions_and_hardware_are_printed(capsys):
    assert main(["env"]) == 0
    facts = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    assert facts["torch"].strip() == torch.__version__
    assert {"covey", "python", "transformers", "accelerate", "extras", "CPU", "memory", "GPU", "bf16"} <= set(facts)


def test_memory_is_the_containers_where_that_is_less(tmp_path):
    limit = tmp_path / "memory.max"
    limit.write_text("1048576\n")
    assert memory_bytes(str(limit)) == 1048576
    limit.write_text("max\n")
    assert memory_bytes(str(limit)) > 1048576
