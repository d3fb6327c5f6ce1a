"""The block pool against a plain model of it: sets and counts."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlxbatch.scheduling.blocks import BlockPool
from mlxbatch.scheduling.prefix import block_content, block_hash


class BlockPoolMachine(RuleBasedStateMachine):
    @initialize(size=st.integers(1, 12))
    def start(self, size):
        self.pool = BlockPool(size)
        self.refs: dict[int, int] = {}
        self.content: dict[int, bytes] = {}  # findable blocks
        self.cached: list[int] = []  # least recently used first
        self.count = 0

    @precondition(lambda self: self.pool.num_available)
    @rule()
    def allocate(self):
        free = [b for b in range(1, self.pool.num_blocks) if b not in self.refs and b not in self.cached]
        block = self.pool.allocate()
        if free:
            assert block == min(free), "the lowest free id goes first"
        else:
            assert block == self.cached.pop(0), "the least recently used cached block is evicted"
            del self.content[block]
        self.refs[block] = 1

    @precondition(lambda self: self.refs)
    @rule(data=st.data(), same=st.booleans())
    def make_findable(self, data, same):
        block = data.draw(st.sampled_from(sorted(self.refs)))
        self.count += 1
        content = block_content([self.count])
        if same and self.content:
            content = data.draw(st.sampled_from(sorted(self.content.values())))
        known = content in self.content.values() or block in self.content
        self.pool.index.add(block_hash(b"", content), content, block)
        if not known:
            self.content[block] = content

    @precondition(lambda self: self.refs or self.cached)
    @rule(data=st.data())
    def retain(self, data):
        block = data.draw(st.sampled_from(sorted([*self.refs, *self.cached])))
        self.pool.retain(block)
        if block in self.cached:
            self.cached.remove(block)
        self.refs[block] = self.refs.get(block, 0) + 1

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def release(self, data):
        block = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.release(block)
        self.refs[block] -= 1
        if not self.refs[block]:
            del self.refs[block]
            if block in self.content:
                self.cached.append(block)

    @rule(more=st.integers(1, 6))
    def grow(self, more):
        self.pool.grow(self.pool.num_blocks + more)

    @rule(data=st.data())
    def shrink(self, data):
        size = data.draw(st.integers(len(self.refs) + 1, self.pool.num_blocks))
        moves = dict(self.pool.shrink(size))
        assert all(src >= size > dst for src, dst in moves.items())
        lost = {b for b in self.cached if b >= size or b in moves.values()}
        self.cached = [b for b in self.cached if b not in lost]
        self.content = {moves.get(b, b): c for b, c in self.content.items() if b not in lost}
        self.refs = {moves.get(b, b): n for b, n in self.refs.items()}

    @rule()
    def forget_cached(self):
        self.pool.forget_cached()
        for block in self.cached:
            del self.content[block]
        self.cached = []

    @precondition(lambda self: hasattr(self, "pool"))
    @invariant()
    def agrees(self):
        self.pool.check()
        assert {b: self.pool.refs(b) for b in self.refs} == self.refs
        assert self.pool.num_used == len(self.refs)
        assert self.pool.num_cached == len(self.cached)
        for block, content in self.content.items():
            assert self.pool.index.find(block_hash(b"", content), content) == block


BlockPoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=80, deadline=None)
TestBlockPool = BlockPoolMachine.TestCase


def test_a_hash_hit_compares_token_ids_too():
    pool = BlockPool(3)
    block = pool.allocate()
    pool.index.add(b"same hash", block_content([1, 2]), block)
    assert pool.index.find(b"same hash", block_content([1, 2])) == block
    assert pool.index.find(b"same hash", block_content([1, 3])) is None
