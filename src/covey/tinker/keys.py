"""The key that programs show to the server, in `TINKER_API_KEY`."""

from covey.runtime.hosts import is_local

KEY = "TINKER_API_KEY"


def checked_key(given: str | None, host: str) -> str | None:
    """The server's key; None where any is accepted, as on this machine alone.

    Raises ValueError for a key that clients refuse, and for none where other machines reach `host`.
    """
    if given is None and not is_local(host):
        raise ValueError(f"{host} can be reached from other machines: set {KEY} to a key that begins with tml-.")
    if given is not None and not given.startswith("tml-"):
        raise ValueError(f"the key of {KEY} or --api-key must begin with tml-, or clients refuse it.")
    return given
