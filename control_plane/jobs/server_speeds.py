"""The measured speed of a job's servers, beside their profiles."""

from __future__ import annotations

from collections.abc import Mapping

from control_plane.planner.speed import correct_speeds


class ServerSpeeds:
    """The corrections of one job's servers, by id; 1.0 until something was measured.

    A server's measured seconds are compared with the plan that they belong to. Plans are made
    ahead, with the speeds of their time, so each measurement is first read as an absolute speed
    and the correction then goes part of the way there: steps planned before a correction took
    effect do not repeat it.
    """

    def __init__(self) -> None:
        self._speeds: dict[str, float] = {}

    def of(self, server_id: str) -> float:
        """The speed to plan ``server_id`` with."""
        return self._speeds.get(server_id, 1.0)

    def snapshot(self) -> Mapping[str, float]:
        """All speeds that differ from 1.0, as they are now."""
        return dict(self._speeds)

    def measured(
        self,
        server_id: str,
        *,
        planned_speed: float,
        predicted_seconds: float,
        measured_seconds: float,
    ) -> None:
        """Takes in one step of one server.

        Args:
            planned_speed: the speed that the step was planned with.
            predicted_seconds: busy seconds that the plan expected.
            measured_seconds: busy seconds that the server reports.
        """
        speed = self.of(server_id)
        if speed > 0 and planned_speed > 0:
            at_speed = predicted_seconds * planned_speed / speed
            self._speeds[server_id] = float(
                correct_speeds([speed], [at_speed], [measured_seconds])[0]
            )
