"""The error of the command line, the data, the trainer and the launcher."""

from __future__ import annotations


class DistcaError(Exception):
    """A failure with advice for the person at the keyboard; no code decides anything by it. The
    command line shows it in one line, without a traceback."""
