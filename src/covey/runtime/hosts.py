"""Addresses that servers listen on."""

import ipaddress


def is_local(host: str) -> bool:
    """True if only this machine can connect to a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name, which may stand for any address
        return False
