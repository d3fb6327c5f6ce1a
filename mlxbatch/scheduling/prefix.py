"""Finding full blocks by what they hold: a chained hash of token ids, as in vLLM's automatic prefix cache."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BlockHash = bytes
BlockContent = bytes  # token ids as int32: bytes cost the garbage collector nothing
ROOT: BlockHash = b""


def block_content(token_ids: Sequence[int]) -> BlockContent:
    return array("i", token_ids).tobytes()


def block_hash(parent: BlockHash, content: BlockContent) -> BlockHash:
    """Hash of a full block: its token ids and, through `parent`, every token before it."""
    return hashlib.blake2b(content, key=parent, digest_size=16).digest()


class PrefixIndex:
    """Which block of one pool holds which content. At most one block for a hash: the first one wins."""

    def __init__(self) -> None:
        self._block_of: dict[BlockHash, int] = {}
        self._entry_of: dict[int, tuple[BlockHash, BlockContent]] = {}

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._entry_of

    def __len__(self) -> int:
        return len(self._entry_of)

    def add(self, hash_: BlockHash, content: BlockContent, block_id: int) -> None:
        """Make a block findable, unless its content already is."""
        if hash_ not in self._block_of and block_id not in self._entry_of:
            self._block_of[hash_] = block_id
            self._entry_of[block_id] = (hash_, content)

    def find(self, hash_: BlockHash, content: BlockContent) -> int | None:
        """The block with this content. The token ids are compared too: a hash alone could collide."""
        block_id = self._block_of.get(hash_)
        if block_id is None or self._entry_of[block_id][1] != content:
            return None
        return block_id

    def remove(self, block_id: int) -> None:
        entry = self._entry_of.pop(block_id, None)
        if entry is not None:
            del self._block_of[entry[0]]

    def move(self, src: int, dst: int) -> None:
        entry = self._entry_of.pop(src, None)
        if entry is not None:
            self._entry_of[dst] = entry
            self._block_of[entry[0]] = dst

    def block_ids(self) -> frozenset[int]:
        return frozenset(self._entry_of)
