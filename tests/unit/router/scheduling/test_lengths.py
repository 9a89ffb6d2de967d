"""The expected number of new tokens of a request."""

from __future__ import annotations

import pytest

from text_generation_router.scheduling.estimates import OutputLengths


def after(*ended: tuple[int, int]) -> OutputLengths:
    lengths = OutputLengths()
    for max_new_tokens, generated in ended:
        lengths.record(max_new_tokens, generated)
    return lengths


def test_half_is_expected_before_anything_ended() -> None:
    assert OutputLengths().expected(100) == 50


@pytest.mark.parametrize("limit", [1, 2, 3, 2_048, 2**40])
def test_the_expected_length_is_within_one_and_the_limit(limit: int) -> None:
    for share in (0, limit // 2, limit, 10 * limit, -5):
        assert 1 <= after(*[(limit, share)] * 200).expected(limit) <= limit


def test_limits_of_different_size_are_estimated_apart() -> None:
    lengths = OutputLengths()
    for _ in range(200):
        lengths.record(2_048, 50)
        lengths.record(20, 20)
    assert lengths.expected(20) == 20
    assert lengths.expected(2_048) < 60


def test_limits_up_to_a_power_of_two_are_estimated_together() -> None:
    lengths = after(*[(1_025, 0)] * 200, *[(1_024, 1_024)] * 200)
    assert lengths.expected(2_048) < 50
    assert lengths.expected(513) > 500


def test_a_new_limit_starts_from_the_nearest_known_one() -> None:
    lengths = after(*[(16, 16)] * 200, *[(4_096, 41)] * 200)
    assert lengths.expected(64) > 60
    assert lengths.expected(1_024) < 40
    lengths.record(1_024, 1_024)
    assert lengths.expected(1_024) == pytest.approx(1_024 * (0.01 + 0.99 / 3), rel=0.05)
    assert lengths.expected(2_048) == pytest.approx(2_048 * (0.01 + 0.99 / 3), rel=0.05)


def test_the_first_requests_count_most() -> None:
    assert after((100, 100)).expected(100) == 67
    settled = after(*[(100, 10)] * 500)
    settled.record(100, 100)
    assert settled.expected(100) < 15


def test_a_change_of_clients_is_followed() -> None:
    assert after(*[(100, 10)] * 500, *[(100, 90)] * 200).expected(100) > 85
