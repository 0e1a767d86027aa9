"""The errors of this package: all are mistakes in what a caller handed in."""

from __future__ import annotations


class ManifestError(ValueError):
    """A manifest breaks an invariant; the message names the document, the values and the rule."""


class PlanError(ValueError):
    """A plan breaks an invariant, or none can be made; the message names document and server."""


class ProfileError(ValueError):
    """A cost profile has holes, values that are not finite and positive, or the wrong shape."""


class TensorError(ValueError):
    """A tensor has the wrong shape, dtype, device or strides; the message names all of them."""


class ScheduleError(ValueError):
    """A pipeline schedule breaks a rule; the message names the action, the slot and the rule."""
