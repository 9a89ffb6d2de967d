from __future__ import annotations

from text_generation_common.exit_codes import exit_fields


def test_exit_fields_have_the_code_and_the_signal() -> None:
    assert exit_fields(3) == {"exit_code": 3}
    assert exit_fields(-9) == {"exit_code": -9, "signal": "SIGKILL"}
    assert exit_fields(-40) == {"exit_code": -40, "signal": "40"}  # real-time signals have no name
