from __future__ import annotations

from text_generation_proto.exit_codes import exit_fields


def test_the_end_of_a_process_is_its_exit_code_or_the_signal_that_killed_it() -> None:
    assert exit_fields(3) == {"exit_code": 3}
    assert exit_fields(-9) == {"exit_code": -9, "signal": "SIGKILL"}
    assert exit_fields(-40) == {"exit_code": -40, "signal": "40"}  # a real-time signal without a name
