"""`covey env` says what a bug report needs."""

import torch

from covey.cli.main import main
from covey.runtime.waiting import CHOSEN


def test_versions_and_hardware_are_printed(capsys):
    assert main(["env"]) == 0
    facts = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    assert torch.__version__.startswith(facts["torch"].strip())  # a build's name may follow
    assert {"covey", "python", "transformers", "accelerate", "extras", "CPU", "memory", "GPU", "bf16"} <= set(facts)
    assert facts["threads wait"].strip() == str(CHOSEN)
