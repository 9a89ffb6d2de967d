"""An echo engine that takes images, and the limits of a server with it."""

from __future__ import annotations

from dataclasses import replace

from checked_echo import CheckedEcho
from http_stack import LIMITS

from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, Failure, Orders

WITH_IMAGES = replace(LIMITS, max_images=3)


class EchoOfImages(CheckedEcho):
    """The echo engine, which takes images and looks at none."""

    def apply(self, orders: Orders) -> list[Failure]:
        return super().apply(replace(orders, placements=tuple(replace(each, media=()) for each in orders.placements)))


def echo_with_images(config: ShardConfig) -> Engine:
    engine = EchoOfImages.build(config)
    engine.info = replace(engine.info, max_images=WITH_IMAGES.max_images)
    return engine
