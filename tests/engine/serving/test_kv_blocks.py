"""Pages: none is lost, none is given out twice, and only what is really in a page is found in it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from liveweight.engine.serving.kv_blocks import BlockPool, next_key, root_key

PAGES = 7


class PoolMachine(RuleBasedStateMachine):
    """A pool beside a model of it: who holds which pages, and what content each page has."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(PAGES)
        self.held: list[list[int]] = []
        self.content: dict[int, bytes] = {}

    @rule(count=st.integers(0, PAGES + 1))
    def take(self, count: int) -> None:
        free = self.pool.free
        pages = self.pool.take(count)
        assert (pages is None) == (count > free)
        if pages is not None:
            in_use = {page for held in self.held for page in held}
            assert in_use.isdisjoint(pages)
            assert len(set(pages)) == count
            for page in pages:
                self.content.pop(page, None)
            self.held.append(pages)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), key=st.integers(0, 9))
    def remember(self, data: st.DataObject, key: int) -> None:
        held = data.draw(st.sampled_from([pages for pages in self.held if pages]))
        page = data.draw(st.sampled_from(held))
        if page not in self.content and bytes([key]) not in self.content.values():
            self.pool.remember(page, bytes([key]))
            self.content[page] = bytes([key])

    @rule(keys=st.lists(st.integers(0, 9), max_size=4, unique=True))
    def find(self, keys: list[int]) -> None:
        pages = self.pool.find([bytes([key]) for key in keys])
        assert [self.content[page] for page in pages] == [bytes([key]) for key in keys[: len(pages)]]
        if len(pages) < len(keys):
            assert bytes([keys[len(pages)]]) not in self.content.values()
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.release(self.held.pop(index))

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        self.content.clear()

    @invariant()
    def every_page_is_free_or_held(self) -> None:
        in_use = {page for held in self.held for page in held}
        assert self.pool.free == PAGES - len(in_use)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_page_without_key_is_taken_before_one_that_may_be_of_use() -> None:
    pool = BlockPool(3)
    first = pool.take(1)
    assert first is not None
    pool.remember(first[0], b"a")
    pool.release(first)
    others = pool.take(2)
    assert others is not None
    assert first[0] not in others
    assert pool.find([b"a"]) == first


def test_a_pool_that_does_not_cache_finds_nothing() -> None:
    pool = BlockPool(2, caching=False)
    pages = pool.take(1)
    assert pages is not None
    pool.remember(pages[0], b"a")
    assert pool.find([b"a"]) == []


def test_keys_tell_weights_order_and_boundaries_apart() -> None:
    root = root_key("a")
    keys = {
        next_key(root, [1, 2]),
        next_key(root, [2, 1]),
        next_key(root_key("b"), [1, 2]),
        next_key(next_key(root, [1]), [2]),
        next_key(root, [1, 2, 0]),
        root,
    }
    assert len(keys) == 6
