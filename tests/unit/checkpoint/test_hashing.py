from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from hetero_fw.app.schema import Ckpt
from hetero_fw.checkpoint import HashAlgorithm
from hetero_fw.checkpoint.hashing import hexdigest, new_hasher

CONTENT = memoryview(bytes(range(256)) * 1000)

# Of "abc": FIPS 180-4, RFC 7693, and what xxhsum -H2 prints.
KNOWN = {
    HashAlgorithm.XXH3_128: "06b05ab6733a618578af5f94892f3950",
    HashAlgorithm.SHA256: "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    HashAlgorithm.BLAKE2B: "ba80a53f981c4d0d6a2797b69f12f6e94c212f14685ac4b74b12bb6fdbffa2d1"
    "7d87c5392aab792dc252d5de4533cc9518d38aa8dbf1925ab92386edd4009923",
}


@pytest.mark.parametrize("algorithm", HashAlgorithm)
def test_pieces_give_the_hash_of_the_whole(algorithm: HashAlgorithm) -> None:
    assert hexdigest(algorithm, b"abc") == KNOWN[algorithm]
    hasher = new_hasher(algorithm)
    for start in range(0, len(CONTENT), 999):
        hasher.update(CONTENT[start : start + 999])
    assert hasher.hexdigest() == hexdigest(algorithm, CONTENT)
    assert new_hasher(algorithm).hexdigest() == hexdigest(algorithm, b"")


def test_all_of_them_can_be_configured() -> None:
    assert get_args(get_type_hints(Ckpt)["hash"]) == tuple(HashAlgorithm)
