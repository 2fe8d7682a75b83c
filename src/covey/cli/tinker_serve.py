"""`covey tinker-serve`: a server for programs written for the `tinker` client, on this machine."""

import argparse
import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from covey.cli.parsers import tinker_serve
from covey.cli.serving import check_port
from covey.runtime.interrupts import Interrupts
from covey.tinker.keys import KEY, checked_key

DEFAULT_PORT = 8010
LOCAL_KEY = "tml-local"  # on this machine any key with this beginning will do


def main(argv: Sequence[str]) -> int:
    words = list(argv)
    command: list[str] = []
    if "--" in words:
        command = words[words.index("--") + 1 :]
        words = words[: words.index("--")]
        if not command:
            raise ValueError("after -- comes the command to run, such as: -- python train.py.")
    given = tinker_serve().parse_args(words)
    if command and given.durable is not None:
        raise ValueError("--durable is for programs that outlive their server; a command after -- ends with it.")
    key = checked_key(given.api_key or os.environ.get(KEY), given.host)
    port = given.port if given.port is not None else 0 if command else DEFAULT_PORT
    if port:
        check_port(given.host, port)
    with _log(given.log) as log:
        return run(given, command, port, key, log)


def run(given: argparse.Namespace, command: Sequence[str], port: int, key: str | None, log: TextIO) -> int:
    from covey.tinker.adapter import AdapterSpec, bytes_of
    from covey.tinker.build import names_of, opened, tokenizer_place
    from covey.tinker.server import served
    from covey.tinker.service import Settings, substitutions

    place = tokenizer_place(given.model)
    settings = Settings(
        names=names_of(given.model, given.names),
        tokenizer_id=place,
        max_clients=given.max_clients,
        max_rank=given.max_rank,
        max_waiting=given.max_waiting,
        seed=given.seed,
        substitute=substitutions(given.substitute),
    )
    options = {
        "token_budget": given.token_budget,
        "max_tokens": given.max_tokens,
        "device": given.device,
        "durable": given.durable,
        "log": lambda line: print(f"covey: {line}", file=log, flush=True),
        "say": lambda line: print(f"covey: {line}", file=sys.stderr, flush=True),
    }
    with (
        (ending := _Ending()).listening(),
        opened(given.model, settings, given.checkpoints, **options) as service,
        served(service, given.host, port, key) as url,
    ):
        size = bytes_of(service.base.model, AdapterSpec(rank=32))
        for line in [*greeting(settings, size), *([] if command else address(url, key))]:
            print(f"covey: {line}", file=sys.stderr, flush=True)
        try:
            return run_command(command, url, key, place is not None) if command else wait()
        finally:
            ending.leaving = True


class _Ending(Interrupts):
    """Ctrl-C or SIGTERM ends the server, which saves states first; a second Ctrl-C ends the process."""

    def on_request(self) -> str:
        text = super().on_request()
        return f"{text} after the operation that runs; Ctrl-C again stops at once" if self.count == 1 else text


def greeting(settings: Any, size: int) -> Iterator[str]:
    """Lines about what is served; `size` are the bytes of a training client of rank 32."""
    from covey.runtime.process_memory import available_memory

    yield f"serving {', '.join(settings.names)}"
    room = max(1, available_memory() // size)
    yield f"{size >> 20:,} MiB for each training client of rank 32: memory for {room}, besides what a step needs"
    for old, new in settings.substitute.items():
        yield f"the loss {old} is {new} here"


def address(url: str, key: str | None) -> Iterator[str]:
    """Lines that tell programs where the server is."""
    yield "programs find it with"
    yield f"  export TINKER_BASE_URL={url}"
    yield f"  export {KEY}={LOCAL_KEY if key is None else '...'}"


def wait() -> int:
    """Serve until Ctrl-C or SIGTERM."""
    threading.Event().wait()
    return 0


def run_command(command: Sequence[str], url: str, key: str | None, offline: bool) -> int:
    """Run a program with the server's address; its exit status."""
    from covey.runtime.child_process import ChildProcess

    added = {"TINKER_BASE_URL": url, KEY: key or LOCAL_KEY, "TINKER_TELEMETRY": "0"}
    if offline:
        added["HF_HUB_OFFLINE"] = os.environ.get("HF_HUB_OFFLINE", "1")
    child = ChildProcess(command, grace=5.0, env={**os.environ, **added})
    try:
        return child.process.wait()
    finally:
        child.end()


@contextlib.contextmanager
def _log(path: Path | None) -> Iterator[TextIO]:
    """The stream for lines about operations: a file, or the error stream."""
    if path is None:
        yield sys.stderr
        return
    with path.open("a", encoding="utf-8") as file:
        yield file
