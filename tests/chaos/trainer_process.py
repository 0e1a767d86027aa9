"""``distca train`` with a log of its ticks: ``... -m tests.chaos.trainer_process LOG train ...``.

The command is the real one; all that is added is a note of the moment whenever a tick has begun or
is complete.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from core_attention.ca_task import Phase
from distca.cli import main
from tests.chaos.tick_log import TickEvent, TickLog
from trainer_client.step.lane_log import LaneLog, SentTick


def note_ticks(log: TickLog) -> None:
    """From now on every tick of this process is noted."""
    add, completed = LaneLog.add, LaneLog.completed

    def noted(sent: SentTick, *, complete: bool) -> None:
        tick = sent.tick
        backward = tick.phase is Phase.BACKWARD
        log.add(TickEvent(time.monotonic(), tick.step, tick.layer, backward, complete))

    def noted_add(lane: LaneLog, sent: SentTick) -> None:
        add(lane, sent)
        noted(sent, complete=False)

    def noted_completed(lane: LaneLog, sent: SentTick) -> None:
        completed(lane, sent)
        noted(sent, complete=True)

    setattr(LaneLog, "add", noted_add)  # noqa: B010 - mypy takes no assignment to a method
    setattr(LaneLog, "completed", noted_completed)  # noqa: B010


if __name__ == "__main__":
    note_ticks(TickLog(Path(sys.argv.pop(1))))
    main()
