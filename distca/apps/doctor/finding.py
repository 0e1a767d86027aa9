"""Findings of checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Severity(StrEnum):
    """The seriousness of a finding."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


_SEVERITY = {Severity.PASS: 0, Severity.WARN: 1, Severity.FAIL: 2}


@dataclass(frozen=True, kw_only=True)
class CheckFinding:
    """One line of the report.

    Attributes:
        status: how serious it is.
        says: what was found.
        advice: what to do; empty if it passed.
        check: name of the check, once it is over.
        figures: what was measured, for scripts; names carry units.
    """

    status: Severity
    says: str
    advice: str = ""
    check: str = ""
    figures: Mapping[str, float | int | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.status is Severity.PASS) == bool(self.advice):
            raise ValueError(
                f"advice is {self.advice!r} and status {self.status}; what did not pass says what "
                "to do, and nothing else does"
            )


def passed(says: str, **figures: float | int | str) -> CheckFinding:
    """All is well."""
    return CheckFinding(status=Severity.PASS, says=says, figures=figures)


def warned(says: str, advice: str, **figures: float | int | str) -> CheckFinding:
    """It works, but not as well as it could."""
    return CheckFinding(status=Severity.WARN, says=says, advice=advice, figures=figures)


def failed(says: str, advice: str, **figures: float | int | str) -> CheckFinding:
    """It will not work."""
    return CheckFinding(status=Severity.FAIL, says=says, advice=advice, figures=figures)


def worst(findings: Iterable[CheckFinding]) -> Severity:
    """The most serious status; PASS if there is none."""
    return max((f.status for f in findings), key=_SEVERITY.__getitem__, default=Severity.PASS)
