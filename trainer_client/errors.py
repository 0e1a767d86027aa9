"""Failures of a session. Mistakes in arguments are ValueErrors; these are failures."""

from __future__ import annotations

from collections.abc import Sequence


class SessionError(RuntimeError):
    """The session, or a step of it, failed. The message says where and what to do."""


class PlanNotReady(SessionError):
    """A step's plan did not come: the deadline passed, or no plan can be made."""


class CoreAttentionFailed(SessionError):
    """A tick failed: a server died, was cut off, or did not answer before the deadline."""


class ChangedInPlace(SessionError):
    """Tensors that are needed again were written to.

    Attributes:
        names: of the tensors.
    """

    def __init__(self, what: object, names: Sequence[str]) -> None:
        name = names[0]
        super().__init__(
            f"{what}: {', '.join(names)} changed in place while still needed; write {name} = "
            f"{name} * x, not {name} *= x, or use a copy"
        )
        self.names = tuple(names)


class SessionClosed(SessionError):
    """The job was closed: another rank failed, a lease expired, or the control plane is gone."""
