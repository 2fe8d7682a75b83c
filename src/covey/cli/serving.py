"""Common part of the commands that start inference servers: parsing their arguments, and exec of the server."""

import importlib.metadata
import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from covey.runtime.hosts import is_local

OWN = ("--model", "--host", "--port", "--api-key", "--dry-run")  # flags of the command itself

OWN_HELP = """\
  --model M        hub id or folder; may also stand first, without --model
  --host H         address to listen on (127.0.0.1); another one, 0.0.0.0 say, needs a key
  --port N         port to listen on ({port})
  --api-key KEY    what every request must carry; better in the environment variable {key}, which other
                   users of the machine cannot see
  --config FILE    YAML mapping of these flags and the server's; flags on the command line override it
  --dry-run        print the command and its environment, and do nothing
  -h, --help       this text"""

Plan = tuple[list[str], dict[str, str], list[str]]
"""Command of a server, without secrets, as any user can read it; additions to its environment; messages."""


@dataclass(frozen=True)
class Backend:
    """Differences between the commands of two backends."""

    name: str
    package: str
    oldest: tuple[int, ...]  # first release with the routes that training uses
    where: str  # advice on where to install it
    key: str  # environment variable that holds the key
    port: int  # default port
    help: str  # with `{own}` for the flags above
    renamed: Mapping[str, str] = field(default_factory=dict)  # the server's names of flags, by those that TRL has
    switches: tuple[str, ...] = ()  # flags that may be followed by True or False; the server has --no-... for False

    def installed(self) -> str:
        """Version in this environment; `ImportError` if missing or too old."""
        try:
            found = importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            raise ImportError(
                f"covey {self.package}-serve needs {self.name}, which {sys.executable} does not have: pip install"
                f" {self.package}{self.where}."
            ) from None
        numbers = tuple(int(part) for part in re.findall(r"\d+", found.partition("+")[0]))
        if numbers[: len(self.oldest)] < self.oldest:
            wanted = ".".join(map(str, self.oldest))
            raise ImportError(
                f"{self.name} {found} is too old: weights are sent by routes that came with {wanted}. pip install -U"
                f" '{self.package}>={wanted}'."
            )
        return found


@dataclass
class Request:
    """Arguments of a command that starts a server."""

    model: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    dry_run: bool = False
    flags: list[str] = field(default_factory=list)  # for the server, with dashes, in the order given

    def command(self, program: list[str], defaults: Mapping[str, str | None]) -> list[str]:
        """Words of a program with this address, defaults of flags that are not given, and the flags that are."""
        words = [*program, "--host", self.host, "--port", str(self.port)]
        for name, value in defaults.items():
            if not self.has(name):
                words += [f"--{name}"] if value is None else [f"--{name}", value]
        return words + self.flags

    def has(self, name: str) -> bool:
        """True if the user gave the server's flag `--name`, switched on or off."""
        name = name.removeprefix("no-")
        return any(re.fullmatch(rf"--(no-)?{name}([=.].*)?", flag) for flag in self.flags)


def serve(argv: Sequence[str], backend: Backend, plan: Callable[[Request, Mapping[str, str]], Plan]) -> int:
    """Become a server (exec); returns only for `--help` and `--dry-run`."""
    if not argv or "-h" in argv or "--help" in argv:
        print(backend.help.replace("{own}", OWN_HELP.format(port=backend.port, key=backend.key)))
        return 0 if argv else 2
    request = parse(argv, os.environ, backend)
    backend.installed()
    command, added, notes = plan(request, os.environ)
    if request.dry_run:
        shown = {name: "..." if name == backend.key else value for name, value in added.items()}
        print(" ".join([*(f"{name}={shlex.quote(value)}" for name, value in shown.items()), shlex.join(command)]))
        return 0
    check_port(request.host, request.port)
    host = request.host if is_local(request.host) else socket.gethostname()
    for note in (f"serving {request.model} at http://{host}:{request.port}", *notes):
        print(f"covey: {note}", file=sys.stderr)
    sys.stderr.flush()
    os.execvpe(command[0], command, {**os.environ, **added})


def parse(argv: Sequence[str], environ: Mapping[str, str], backend: Backend) -> Request:
    """Split arguments, in either spelling, into the command's and the server's, and check them."""
    request = Request(port=backend.port, api_key=environ.get(backend.key) or None)
    words = list(argv)
    if words and not words[0].startswith("-"):
        words.insert(0, "--model")
    words = _with_files(words)
    while words:
        flag, equals, value = words.pop(0).partition("=")
        if flag.startswith("--"):
            name, dot, key = flag.partition(".")  # keys after a dot belong to JSON and stay
            name = name.replace("_", "-")
            flag = backend.renamed.get(name, name) + dot + key
        if whole := next((own for own in OWN if flag[2:] and own.startswith(flag) and own != flag), None):
            # The server would take it for the whole flag, and listen elsewhere than was checked.
            raise ValueError(f"{flag} is not a flag of its own: write {whole} in full.")
        if flag == "--dry-run":
            request.dry_run = True
        elif flag in OWN:
            if not equals:
                if not words or words[0].startswith("--"):
                    raise ValueError(f"{flag} needs a value after it; `covey {backend.package}-serve -h` shows how.")
                value = words.pop(0)
            if flag == "--port" and not (value.isdigit() and 0 < int(value) < 65536):
                raise ValueError(f"--port {value} must be a number from 1 to 65535.")
            setattr(request, flag[2:].replace("-", "_"), int(value) if flag == "--port" else value)
        elif flag[2:] in backend.switches and (equals or (words and words[0].lower() in ("true", "false"))):
            on = (value if equals else words.pop(0)).lower()
            if on not in ("true", "false"):
                raise ValueError(f"{flag}={value} is neither true nor false; write {flag} or --no-{flag[2:]}.")
            request.flags.append(flag if on == "true" else f"--no-{flag[2:]}")
        else:
            request.flags.append(flag + equals + value)
    _check(request, backend)
    return request


def _check(request: Request, backend: Backend) -> None:
    """Refuse a request without a model, one that other machines reach without a key, and flags for other ports or
    keys."""
    if closed := next((flag for flag in request.flags if flag.startswith("--grpc")), None):
        raise ValueError(
            f"{closed} opens a server that asks for no key and that training does not speak to: leave it out."
        )
    if request.has("admin-api-key"):
        raise ValueError(
            "--admin-api-key sets a second key for routes that training needs, but the trainer sends one: set"
            f" {backend.key} alone."
        )
    if not request.model:
        raise ValueError("which model? Give --model with a hub id or a folder.")
    if not request.api_key and not is_local(request.host):
        raise ValueError(
            f"--host {request.host} lets other machines in, and whoever reaches this server can replace its weights:"
            f" set the environment variable {backend.key} (or give --api-key), or leave --host at 127.0.0.1."
        )


def _with_files(words: list[str]) -> list[str]:
    """Put the flags of `--config` files before all other arguments, which override them."""
    own, files = list(words), []
    while (place := next((i for i, word in enumerate(own) if word.partition("=")[0] == "--config"), None)) is not None:
        _, equals, path = own.pop(place).partition("=")
        if not equals:
            if place == len(own) or own[place].startswith("--"):
                raise ValueError("--config needs a YAML file after it.")
            path = own.pop(place)
        files += flags_of_file(path)
    return files + own


def flags_of_file(path: str) -> list[str]:
    """Flags in a YAML file, as the servers' own `--config` reads them: `{model: m, lora: true}` is --model=m --lora."""
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: {error}. Give a YAML file of flags, as in `model: my/model`.") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"--config {path} must be a mapping of flags to values; write lines like `model: my/model`.")
    flags = []
    for name, value in found.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{dashed}")
        elif isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        elif value is not None:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            flags.append(f"--{'model' if dashed == 'model-path' else name}={text}")
    return flags


def check_port(host: str, port: int) -> None:
    """Raise `ValueError` if the port is in use or the host not of this machine: now, not after a minute of loading."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((host.strip("[]"), port))
        except OSError as error:
            raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}. Choose another --port.") from error
