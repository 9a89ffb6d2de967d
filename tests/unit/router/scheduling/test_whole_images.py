"""Prompts with images that an engine computes whole: a chunk that ends inside one waits for the rest of it."""

from __future__ import annotations

import random

import pytest
from scheduler_rig import BLOCK, Rig, Sequence, a_policy, words

from text_generation_proto.cache_groups import CacheGroup
from text_generation_router.request import ImageFile, PlacedImage, Request, RequestId
from text_generation_router.scheduling.messages import SchedulerOutput

WITHOUT_BLOCKS = (26, 33, 61, 64, 159, 171, 204, 210)
"""Seeds with which all prompts wait inside images while the window group has no block left."""


class WholeImages(Rig):
    """Replicas that compute an image in one step."""

    def __post_init__(self) -> None:
        self.computed: dict[int, int] = {}
        """Tokens of the prompt in each slot, likewise those ordered beyond them."""
        self.waiting: dict[int, int] = {}
        super().__post_init__()

    def submit_image(self, image: PlacedImage, length: int, new: int) -> None:
        number = self.submitted
        self.submitted += 1
        request = Request(RequestId(number), words(number + 1, length), new, media=(image,))
        self.receive(self.scheduler.submit(request, self.now))

    def take_orders(self, here: dict[int, Sequence], orders: SchedulerOutput) -> dict[int, int]:
        ordered = super().take_orders(here, orders)
        for placement in orders.placements:
            self.computed[placement.slot], self.waiting[placement.slot] = placement.cached_tokens, 0
        chunks: dict[int, int] = {}
        for slot, tokens in ordered.items():
            done = self.computed[slot]
            end = done + self.waiting[slot] + tokens
            request = here[slot].placement.request
            stop = request.media[0].offset if request.has_image_around(end) else end
            self.waiting[slot] = end - max(stop, done)
            if stop > done:
                chunks[slot], self.computed[slot] = stop - done, stop
        return chunks


@pytest.mark.parametrize("seed", WITHOUT_BLOCKS)
def test_prompts_that_wait_inside_images_give_way_to_one_another(seed: int) -> None:
    draw = random.Random(seed)
    budget, window = draw.choice([64, 96, 128]), draw.choice([16, 32, 48])
    tokens = draw.randrange(max(16, budget // 2), budget - 8)
    least = CacheGroup(1000, window).blocks_held(1 << 20, BLOCK) + budget // BLOCK
    group = CacheGroup(least + draw.randrange(3), window)
    rig = WholeImages(a_policy(max_batch_prefill_tokens=budget), blocks=200, slots=4, windows=(group,))
    for number in range(draw.randrange(2, 5)):
        first = draw.randrange(1, budget)
        image = PlacedImage(first, tokens, ImageFile(bytes([number]), b"x"))
        rig.submit_image(image, first + tokens + draw.randrange(1, 20), draw.randrange(1, 6))
    rig.until_idle()
