"""What a check found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    """How serious a finding is."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


_SEVERITY = {Status.PASS: 0, Status.WARN: 1, Status.FAIL: 2}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
        check: name of the check.
        status: how serious it is.
        says: what was found.
        advice: what to do; empty if it passed.
        figures: what was measured, for scripts; names carry units.
    """

    check: str
    status: Status
    says: str
    advice: str = ""
    figures: Mapping[str, float | int | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.status is Status.PASS) == bool(self.advice):
            raise ValueError(
                f"check {self.check}: advice is {self.advice!r} and status {self.status}; what did "
                "not pass says what to do, and nothing else does"
            )


def passed(check: str, says: str, **figures: float | int | str) -> Finding:
    """All is well."""
    return Finding(check=check, status=Status.PASS, says=says, figures=figures)


def warned(check: str, says: str, advice: str, **figures: float | int | str) -> Finding:
    """It works, but not as well as it could."""
    return Finding(check=check, status=Status.WARN, says=says, advice=advice, figures=figures)


def failed(check: str, says: str, advice: str, **figures: float | int | str) -> Finding:
    """It will not work."""
    return Finding(check=check, status=Status.FAIL, says=says, advice=advice, figures=figures)


def worst(findings: Iterable[Finding]) -> Status:
    """The most serious status; PASS if there is none."""
    return max((f.status for f in findings), key=_SEVERITY.__getitem__, default=Status.PASS)
