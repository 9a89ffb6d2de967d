"""An echo engine that takes images, and the limits of a server with it."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO

from checked_echo import CheckedEcho
from http_stack import LIMITS
from PIL import Image

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import FailureCode
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, Failure, Orders

WITH_IMAGES = replace(LIMITS, max_images=3)


class EchoOfImages(CheckedEcho):
    """The echo engine, which takes images and does nothing but decode them."""

    def apply(self, orders: Orders) -> list[Failure]:
        placements, failed = [], []
        for each in orders.placements:
            try:
                for media in each.media:
                    Image.open(BytesIO(media.data)).load()
                placements.append(replace(each, media=()))
            except (OSError, SyntaxError) as error:
                failed.append(Failure(each.slot, FailureCode.IMAGE, f"image 1 cannot be read: {error}"))
        kept = {each.slot for each in placements}
        prefill = tuple(each for each in orders.prefill if each[0] in kept or each[0] in self.table.sequences)
        return failed + super().apply(replace(orders, placements=tuple(placements), prefill=prefill))


def echo_with_images(config: ShardConfig, further_groups: tuple[CacheGroup, ...] = ()) -> Engine:
    engine = EchoOfImages.build(config, further_groups=further_groups)
    engine.info = replace(engine.info, max_images=WITH_IMAGES.max_images)
    return engine
