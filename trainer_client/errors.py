"""What can go wrong in a session. Mistakes in arguments are ValueErrors; these are failures."""

from __future__ import annotations


class SessionError(RuntimeError):
    """The session, or a step of it, failed. The message says where and what to do."""


class PlanNotReady(SessionError):
    """A step's plan did not come: the deadline passed, or no plan can be made."""


class CoreAttentionFailed(SessionError):
    """A tick failed: a server died, was cut off, or did not answer before the deadline."""


class SessionClosed(SessionError):
    """The job was closed: another rank failed, a lease expired, or the control plane is gone."""
