"""API keys: which headers carry one, and the name of a key."""

from __future__ import annotations

import pytest

from text_generation_router.api.http.caller import ApiKeys

KEYS = ApiKeys(["sk-First", "second"])


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
    assert KEYS.admit(headers)


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
    assert not KEYS.admit(headers)


@pytest.mark.parametrize("key", ["", "two words", "naïve", "new\nline"])
def test_a_key_that_no_header_can_carry_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(ValueError, match="visible ASCII") as refused:
        ApiKeys(["good", key])
    assert not key or key not in str(refused.value)


def test_the_name_of_a_key_does_not_depend_on_the_header() -> None:
    holder = KEYS.holder({"Authorization": "bearer sk-First"})
    assert holder == KEYS.holder({"x-api-key": "sk-First"}) == ApiKeys(["sk-First"]).holder({"x-api-key": "sk-First"})
    assert holder != KEYS.holder({"x-api-key": "second"})
    assert KEYS.holder({}) is KEYS.holder({"x-api-key": "third"}) is None


def test_the_name_of_a_key_does_not_reveal_it() -> None:
    name = KEYS.holder({"x-api-key": "second"})
    assert name is not None
    assert len(name) == 16
    assert "second" not in name
    assert not any("second" in str(value) for value in vars(KEYS).values())
    # Nor is it the digest that keys are compared by.
    assert not any(name in digest.hex() for digest in vars(KEYS)["_digests"])


@pytest.mark.parametrize(("keys", "several"), [([], False), (["a"], False), (["a", "a"], False), (["a", "b"], True)])
def test_only_several_keys_distinguish_tenants(keys: list[str], several: bool) -> None:
    assert ApiKeys(keys).several is several
