from __future__ import annotations

from text_generation_launcher.endings import ending


def test_the_end_of_a_process_is_its_exit_code_or_the_signal_that_killed_it() -> None:
    assert ending(3) == {"exit_code": 3}
    assert ending(-9) == {"exit_code": -9, "signal": "SIGKILL"}
    assert ending(-40) == {"exit_code": -40, "signal": "40"}  # a real-time signal without a name
