"""Programs that tests run to their end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import ROOT

RUN_SECONDS = 100.0
"""Far above what any of them takes on a busy machine."""


def ran(
    *command: str | Path, timeout: float = RUN_SECONDS, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """The end of ``command`` and all that it has said, in the repository's root unless told."""
    options = {"cwd": ROOT, "text": True, **options}
    return subprocess.run(command, capture_output=True, timeout=timeout, check=check, **options)


def ran_python(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The same of a Python program that is given as text."""
    return ran(sys.executable, "-c", code, *arguments, **options)
