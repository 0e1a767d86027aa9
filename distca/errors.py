"""The errors of the command line, the data, the trainer and the launcher.

All are meant for the person at the keyboard: the command line shows them in one line, by name and
without a traceback.
"""

from __future__ import annotations


class DistcaError(Exception):
    """Base of the errors below."""


class DataError(DistcaError):
    """The training data cannot be read, or hold no document."""


class SettingsError(DistcaError):
    """Two settings contradict each other."""


class MissingPackageError(DistcaError):
    """A package is needed that is not installed."""


class CheckpointError(DistcaError):
    """A checkpoint cannot be written or read, or belongs to another run."""


class RunFolderError(DistcaError):
    """The folder of a run exists already, does not exist, or holds no readable record."""


class RanksDisagreeError(DistcaError):
    """Ranks of one job were started with different data or settings."""


class VerificationError(DistcaError):
    """Loss or gradients differ from those of local attention by more than the tolerance."""


class DivergenceError(DistcaError):
    """Loss or gradients are no longer finite."""


class ProcessFailedError(DistcaError):
    """A process of a local run ended before its work was done, or never became ready."""
