"""API keys: the headers that carry one, the rights of their holders, the file of keys."""

from __future__ import annotations

import os
import re
from hashlib import sha256
from pathlib import Path

import pytest
from api_settings import api_keys

from text_generation_router.api.http.keys import ApiKeys, KeyHolder
from text_generation_router.errors import RateLimited
from text_generation_router.rate_limits import MIN_PRUNED, RateLimits, Rates
from text_generation_router.request import Priority

KEYS = api_keys("sk-First", "second")


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer sk-First"},
        {"Authorization": "bearer second"},
        {"x-api-key": "sk-First"},
        {"x-api-key": "second", "Authorization": "Bearer other"},
        {"x-api-key": "other", "Authorization": "Bearer second"},
    ],
)
def test_a_valid_key_in_either_header_is_accepted(headers: dict[str, str]) -> None:
    assert KEYS.holder(headers) is not None


@pytest.mark.parametrize(
    "headers",
    [
        *({"Authorization": value} for value in (
            "", "sk-First", "Bearer", "Bearer ", "Bearer sk-first", "Bearer sk-Firs", "Bearer sk-First2",
            "Bearer  sk-First", "Bearer sk-First,second", "Basic sk-First", "Bearer \udcff",
        )),
        {}, {"x-api-key": "SECOND"}, {"x-api-key": "Bearer second"},
    ],
)  # fmt: skip
def test_anything_else_is_rejected(headers: dict[str, str]) -> None:
    assert KEYS.holder(headers) is None


@pytest.mark.parametrize("key", ["", "two words", "naïve", "new\nline"])
def test_a_key_that_no_header_can_carry_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(ValueError, match="visible ASCII") as refused:
        api_keys("good", key)
    assert not key or key not in str(refused.value)


def test_the_tenant_of_a_key_is_stable_and_does_not_reveal_it() -> None:
    holder = KEYS.holder({"Authorization": "bearer sk-First"})
    again = api_keys("third", "sk-First").holder({"x-api-key": "sk-First"})
    other = KEYS.holder({"x-api-key": "second"})
    assert holder is not None
    assert again is not None
    assert other is not None
    assert holder.tenant == again.tenant != other.tenant
    assert len(holder.tenant) == 16
    assert not any("sk-First" in str(value) for value in vars(KEYS)["_holders"].items())
    # Nor is it the digest that keys are compared by.
    assert not any(holder.tenant in digest.hex() for digest in vars(KEYS)["_holders"])


def holders(keys: ApiKeys, *names: str) -> list[KeyHolder]:
    found = [keys.holder({"x-api-key": name}) for name in names]
    return [holder for holder in found if holder is not None]


async def test_the_file_gives_each_key_its_rights_and_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    digest = sha256(b"sk-b").hexdigest()
    file.write_text(
        f"""
[[keys]]
key = "sk-a"
tenant = "search"
max_priority = "system"
trust_headers = true
[[keys]]
sha256 = "{digest}"
tenant = "chat"
requests_per_minute = 2
"""
    )
    now = 100.0
    keys = api_keys("sk-flag", file=file, rates=RateLimits(lambda: now))
    first, second, flag = holders(keys, "sk-a", "sk-b", "sk-flag")
    assert (first.tenant, first.max_priority, first.trusted) == ("search", Priority.SYSTEM, True)
    assert (second.tenant, second.max_priority, second.trusted) == ("chat", Priority.INTERACTIVE, False)
    assert not flag.trusted
    await second.start_request()
    await second.start_request()
    file.write_text(f'[[keys]]\nsha256 = "{digest}"\ntenant = "talk"\nrequests_per_minute = 2')
    keys.reload()
    [second] = holders(keys, "sk-a", "sk-b")
    assert second.tenant == "talk"
    now = 101.0
    with pytest.raises(RateLimited, match="2 requests a minute") as refused:
        await second.start_request()  # the limit did not change, and its level is kept
    assert refused.value.retry_after == 29
    now = 130.0
    await second.start_request()
    file.write_text("[[keys]]")
    with pytest.raises(ValueError, match="either `key` or `sha256`"):
        keys.reload()
    assert holders(keys, "sk-b") == [second]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "at least one"),
        ("keys = 1", "at least one"),
        ("[[keys]]\nkey = 'sk-secret'\nweight = 2", "weight: Extra inputs"),
        ("[[keys]]\nkey = 'sk-secret'\nmax_priority = 'root'", "max_priority: Input should be 'system'"),
        ("[[keys]]\nkey = 'sk-secret'\nrequests_per_minute = 0", "requests_per_minute: Input should be greater"),
        ("[[keys]]\nsha256 = 'sk-secret'", "sha256: String should match"),
        ("[[keys]]\nkey = 'sk-secret'\n[[keys]]\nkey = 'sk-secret'", "given twice"),
        ("[[keys]]\nkey = 'sk secret'", "visible ASCII"),
        ("[[keys", "Expected"),
        ("keys = " + "[" * 100_000, "nested too deep"),
        ("#" * 5_000_000, "larger than 4 MiB"),
    ],
)
def test_an_invalid_file_is_refused_without_showing_a_key(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(problem)) as refused:
        api_keys(file=file)
    assert "secret" not in str(refused.value)
    with pytest.raises(ValueError, match="No such file"):
        api_keys(file=tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")  # to open it would wait for a writer
    with pytest.raises(ValueError, match="not a file"):
        api_keys(file=tmp_path / "pipe")


async def test_tokens_are_paid_afterwards_and_bound_the_rate() -> None:
    now = 10.0
    holder = KeyHolder(rates=Rates("key", None, 600), counter=RateLimits(lambda: now))
    await holder.start_request()
    holder.spend_tokens(1199)  # 599 below zero, at ten a second
    now = 11.0
    with pytest.raises(RateLimited, match="600 tokens a minute") as refused:
        await holder.start_request()
    assert refused.value.retry_after == 59
    now = 70.0
    await holder.start_request()


async def test_full_buckets_are_forgotten_and_others_are_kept() -> None:
    now = 0.0
    limits = RateLimits(lambda: now)
    await limits.start_request(Rates("spent", 1, None))
    for number in range(3 * MIN_PRUNED):
        now += 0.005
        limits.spend_tokens(Rates(f"key {number}", None, 600), 1)  # full again after a tenth of a second
        assert len(limits._buckets) <= MIN_PRUNED
    with pytest.raises(RateLimited):
        await limits.start_request(Rates("spent", 1, None))
