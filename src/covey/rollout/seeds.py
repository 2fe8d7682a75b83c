"""What seeds a sample."""

import hashlib


def sample_seed(*key: int | str) -> int:
    """A 63-bit seed that depends on every part of the key and on nothing else."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
