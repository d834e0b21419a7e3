"""The hashes that tell whether bytes are still those that were written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Protocol

import xxhash


class HashAlgorithm(StrEnum):
    """What the files and chunks of a checkpoint are hashed with.

    All find accidents. Bytes that somebody has chosen to have a given hash pass for others under
    XXH3_128 alone. `sha256sum` and `b2sum` print the same digests of a file.
    """

    XXH3_128 = "xxh3_128"
    SHA256 = "sha256"
    BLAKE2B = "blake2b"


class Hasher(Protocol):
    """A hash of bytes that come one piece after the other; large ones release the interpreter."""

    def update(self, content: memoryview, /) -> None:
        """Add the next piece."""

    def hexdigest(self) -> str:
        """Hash of all pieces so far."""


_HASHERS: Mapping[HashAlgorithm, Callable[[], Hasher]] = {
    HashAlgorithm.XXH3_128: xxhash.xxh3_128,
    HashAlgorithm.SHA256: hashlib.sha256,
    HashAlgorithm.BLAKE2B: hashlib.blake2b,
}
_HEXDIGESTS: Mapping[HashAlgorithm, Callable[[bytes | memoryview], str]] = {
    HashAlgorithm.XXH3_128: xxhash.xxh3_128_hexdigest,  # without an object: chunks may be many
    HashAlgorithm.SHA256: lambda content: hashlib.sha256(content).hexdigest(),
    HashAlgorithm.BLAKE2B: lambda content: hashlib.blake2b(content).hexdigest(),
}


def new_hasher(algorithm: HashAlgorithm) -> Hasher:
    """A hash of no bytes yet."""
    return _HASHERS[algorithm]()


def hexdigest(algorithm: HashAlgorithm, content: bytes | memoryview) -> str:
    """Hash of bytes that are all there."""
    return _HEXDIGESTS[algorithm](content)
