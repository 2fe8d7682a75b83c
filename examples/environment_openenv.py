"""An OpenEnv environment: the one that `openenv init` makes, an echo. `pip install openenv`

It runs unmodified in a server of its own, as any OpenEnv environment does; longer messages earn more, up to 1. The
server allows one session at a time, so `max_environments=1` lets rollouts take turns.
"""

import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from common import parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.rollout.environments import OpenEnvironment


@contextmanager
def served(app, folder):
    """The address of a server of `app`, as in module:name of that folder; it ends with the context."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", app, "--port", str(port), "--log-level", "error"]
    server = subprocess.Popen(command, cwd=folder)
    try:
        while server.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


@contextmanager
def echo_server():
    """The address of a server of the environment that `openenv init` makes."""
    openenv = Path(sys.executable).with_name("openenv")
    with TemporaryDirectory() as folder:
        subprocess.run([openenv, "init", "echo_env"], cwd=folder, check=True, capture_output=True)
        with served("echo_env.server.app:app", folder) as address:
            yield address


def main():
    options = parser(__doc__).parse_args()
    with echo_server() as address:
        echo = OpenEnvironment(
            address,
            action="message",
            show=lambda observation: observation["echoed_message"],
            max_turns=1,
            max_environments=1,
        )
        trainer = GRPOTrainer(
            model=options.model,
            environment_factory=echo,
            train_dataset=echo.dataset(16),
            args=GRPOConfig(**settings(options) | {"max_completion_length": 12}),
        )
        trainer.train()
    return trainer


if __name__ == "__main__":
    main()
