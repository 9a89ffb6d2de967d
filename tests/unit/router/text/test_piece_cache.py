"""The cache of pieces: what is encoded again, for whom, and its memory."""

from __future__ import annotations

from array import array
from pathlib import Path

import tokenizers

from text_generation_router.admission_queue import PendingWork
from text_generation_router.request import TenantId
from text_generation_router.text.cuts import PIECE_CHARACTERS
from text_generation_router.text.tokenizer import Tokenizer
from text_generation_router.text.tokenizer_pool import PIECE_BYTES, PieceCache, TokenizerPool, piece_digest

ANN, BOB = TenantId("ann"), TenantId("bob")
PIECE = array("I", range(25))
SIZE = PIECE_BYTES + 100


class CountingTokenizer(Tokenizer):
    """Counts the characters of the pieces that it encodes."""

    encoded = 0

    def encode_piece(self, text: str, start: int, stop: int, *, offsets: bool) -> list[array[int]]:
        self.encoded += stop - start
        return super().encode_piece(text, start, stop, offsets=offsets)


async def test_a_resent_text_costs_its_end_but_not_for_others(demo_model: Path) -> None:
    tokenizer = CountingTokenizer(tokenizers.Tokenizer.from_file(str(demo_model / "tokenizer.json")))
    text = "".join(f"Line {number} of a long text.\n" for number in range(4000))

    async def cost(text: str, tenant: TenantId, salt: str = "") -> int:
        tokenizer.encoded = 0
        await pool.encode_ids(text, add_special_tokens=False, tenant=tenant, salt=salt)
        return tokenizer.encoded

    async with TokenizerPool(tokenizer, 1, PendingWork()) as pool:
        assert await cost(text, ANN) == len(text)
        assert await cost(text + "And one more.", ANN) < 1.1 * PIECE_CHARACTERS
        assert await cost(text[: len(text) // 2] + "Now" + text[len(text) // 2 :], ANN) < 0.55 * len(text)
        assert await cost(text, BOB) == len(text)
        assert await cost(text, ANN, "salt") == len(text)


def test_a_digest_tells_all_that_the_tokens_of_a_piece_depend_on() -> None:
    places = [("", "ab c", 1, 4), ("", "xb c", 1, 4), ("", "b c", 0, 3), ("", "ab c", 0, 4), ("", "ab c", 1, 3)]
    assert len({piece_digest(*place) for place in [*places, ("s", "ab c", 1, 4)]}) == 6
    assert piece_digest("", "ab cd", 2, 4) == piece_digest("", "b cde", 1, 3)


def test_the_least_recently_used_piece_of_the_tenant_with_the_most_goes() -> None:
    cache = PieceCache(4 * SIZE)
    cache.put(BOB, b"0", PIECE)
    for name in (b"1", b"2", b"3"):
        cache.put(ANN, name, PIECE)
    assert cache.get(ANN, b"1") == PIECE
    cache.put(ANN, b"4", PIECE)
    assert [cache.get(ANN, name) is not None for name in (b"1", b"2", b"4")] == [True, False, True]
    assert cache.get(BOB, b"0") == PIECE
    assert cache.get(BOB, b"1") is None


def test_the_memory_is_bounded_and_given_back() -> None:
    cache = PieceCache(100 * SIZE)
    for number in range(1000):
        cache.put(TenantId(str(number % 7)), number.to_bytes(4, "big"), PIECE)
        cache.put(TenantId(str(number % 7)), number.to_bytes(4, "big"), PIECE)
        assert cache.bytes <= 100 * SIZE
    assert cache.bytes > 90 * SIZE
    cache.put(ANN, b"too large", array("I", range(30_000)))
    assert cache.get(ANN, b"too large") is None
    assert cache.bytes <= 100 * SIZE
