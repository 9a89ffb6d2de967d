"""A heap with changing keys."""

from __future__ import annotations

import random

from text_generation_router.scheduling.lazy_heap import SLACK, Key, LazyHeap


class Item:
    def __init__(self, value: float, number: int = 0) -> None:
        self.key: Key = (value, number)


def key_of(item: Item) -> Key:
    return item.key


def test_the_first_item_is_the_smallest_after_any_change() -> None:
    draw = random.Random(3)
    heap: LazyHeap[Item] = LazyHeap(key_of)
    items: list[Item] = []
    for number in range(5000):
        if not items or draw.random() < 0.4:
            items.append(Item(draw.random(), number))
            heap.put(items[-1])
        else:
            item = draw.choice(items)
            value = item.key[0] + draw.uniform(-1, 1)
            fell, item.key = value < item.key[0], (value, number)
            if fell:
                heap.put(item)
            elif draw.random() < 0.7:
                items.remove(item)
                heap.discard(item)
        assert heap.first() is min(items, key=key_of, default=None)
        assert len(heap._heap) - SLACK <= 2 * len(heap) == 2 * len(items)


def test_an_item_may_reuse_the_key_of_a_removed_one() -> None:
    heap: LazyHeap[Item] = LazyHeap(key_of)
    others = [Item(2.0, number) for number in range(9)]
    for item in others:
        heap.put(item)
    old, new = Item(1.0), Item(1.0)
    heap.put(old)
    heap.discard(old)
    heap.put(new)
    assert heap.first() is new
    heap.discard(new)
    assert heap.first() is others[0]
