"""What a transport remembers of the adapters it sends: their names, and which servers have which of them."""

import uuid
from typing import Any

from covey.core.weights import WeightUpdate
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.protocols import ServerFacts


class AdapterBook:
    """The part of a `WeightTransport` that is the same for every make of server.

    A server is known by its URL and by what tells one start of it from another; "" where it does not say.

    Args:
        prefix: of the names that adapters are loaded under.
    """

    def __init__(self, prefix: str):
        self._prefix = prefix
        self._run = uuid.uuid4().hex[:8]
        self._bases: set[tuple[str, str]] = set()  # servers that have the model that adapters lie on
        self._adapters: dict[int, str] = {}  # names, by version
        self._loaded: dict[tuple[str, str], list[str]] = {}  # names, by server
        self._named: tuple[WeightUpdate, str] | None = None
        self._updates = 0

    def model_name(self, facts: ServerFacts, version: int) -> str:
        """The name to sample `version` from."""
        return self._adapters.get(version, facts.model)

    def tell(self) -> dict[str, str]:
        """The names of adapters, by version."""
        return {str(version): name for version, name in self._adapters.items()}

    def learn(self, told: dict[str, Any]) -> None:
        """Names that another process gave."""
        self._adapters = {int(version): name for version, name in told.items()}

    def forget(self, server: ServerClient) -> None:
        """Send a server everything again, unless it tells one start from another: it may have been started anew."""
        self._bases.discard((server.url, ""))
        self._loaded.pop((server.url, ""), None)

    def _name_for(self, update: WeightUpdate) -> str:
        """The same for another attempt at an update, another for every update, also of one version."""
        if self._named is None or self._named[0] is not update:
            self._updates += 1
            self._named = update, f"{self._prefix}{self._run}-v{update.version}-{self._updates}"
        return self._named[1]
