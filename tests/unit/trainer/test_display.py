"""What a person sees: lines in a log, a bar on a terminal."""

from __future__ import annotations

import io

from ddpjob_trainer.telemetry.console import Display


def show(columns: int, steps: int) -> str:
    stream, moment = io.StringIO(), [0.0]
    display = Display(steps, columns=columns, stream=stream, clock=lambda: moment[0])
    for step in range(1, steps + 1):
        moment[0] += 0.06
        if step % 5 == 0:
            display.line(step, 1 / step, 12345.6, step - 1)
        else:
            display.step(step, 1 / step, step - 1)
    display.close()
    return stream.getvalue()


def test_a_log_gets_a_line_every_few_steps_and_nothing_else():  # type: ignore[no-untyped-def]
    assert show(0, 11) == (
        "step 5/11 loss 0.2000 12,346 samples/s snapshot 4\n"
        "step 10/11 loss 0.1000 12,346 samples/s snapshot 9\n"
    )


def test_a_terminal_gets_a_bar_that_stays_on_one_line():  # type: ignore[no-untyped-def]
    text = show(60, 10)
    states = text.split("\r")
    assert text.count("\n") == 1
    assert text.endswith("\r\n")
    assert 5 <= len(states) <= 8  # 10 times a second at most, and every line
    for state in states[:-1]:
        assert state.endswith("\x1b[K")
        assert len(state) - len("\x1b[K") <= 59
    assert "[############------------] step 5/10" in text
    assert "[########################] step 10/10" in states[-2]
