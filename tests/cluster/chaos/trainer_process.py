"""``distca train`` with a log of its ticks.

``python -m tests.cluster.chaos.trainer_process LOG train ...``: the command is the real one; all
that is added is a note of the moment whenever a tick has begun or is complete.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from core_attention.ca_task import Phase
from core_attention.tick import Tick
from distca.cli import main
from tests.cluster.chaos.tick_log import TickEvent, TickLog
from trainer_client.machine.instructions import ForgetInputs, ForgetQueries
from trainer_client.machine.lane import BegunTick, LaneMachine


def note_ticks(log: TickLog) -> None:
    """From now on every tick of this process is noted."""
    begin, complete = LaneMachine.begin, LaneMachine.complete

    def noted(tick: Tick, *, complete: bool) -> None:
        backward = tick.phase is Phase.BACKWARD
        log.add(TickEvent(time.monotonic(), tick.step, tick.layer, backward, complete))

    def noted_begin(lane: LaneMachine, tick: Tick, index: int) -> BegunTick:
        noted(tick, complete=False)
        return begin(lane, tick, index)

    def noted_complete(
        lane: LaneMachine, done: BegunTick
    ) -> Sequence[ForgetInputs | ForgetQueries]:
        noted(done.tick, complete=True)
        return complete(lane, done)

    setattr(LaneMachine, "begin", noted_begin)  # noqa: B010 - mypy takes no assignment to a method
    setattr(LaneMachine, "complete", noted_complete)  # noqa: B010


if __name__ == "__main__":
    note_ticks(TickLog(Path(sys.argv.pop(1))))
    main()
