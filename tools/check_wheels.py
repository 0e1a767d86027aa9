"""Looks in pip's index for wheels of all packages of ``docker/constraints.txt``.

    python -m tools.check_wheels aarch64

Prints the packages that have none; exits with 1 if there are any. Nothing is installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent / "docker" / "constraints.txt"

PYTHON_VERSION = "3.12"
"""Of both base images of ``docker/Dockerfile``."""

_NEWEST_GLIBC = 36
"""Debian bookworm's 2.36, the older one of both base images."""

_OLDEST_GLIBC = 17
_SECONDS_A_PACKAGE = 300


def main(architecture: str) -> None:
    """Checks all packages; see the module."""
    missing = list(without_wheel(pinned(CONSTRAINTS.read_text()), architecture))
    for package, why in missing:
        print(f"{package}: {why}")
    if missing:
        sys.exit(f"{len(missing)} packages have no wheel for {architecture}")
    print(f"all packages have wheels for {architecture}")


def pinned(text: str) -> list[str]:
    """The requirements in a constraints file."""
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def without_wheel(requirements: Iterable[str], architecture: str) -> Iterable[tuple[str, str]]:
    """(requirement, pip's reason) of those that pip cannot install on ``architecture``."""
    platforms = [
        f"--platform=manylinux_2_{minor}_{architecture}"
        for minor in range(_NEWEST_GLIBC, _OLDEST_GLIBC - 1, -1)
    ]
    with tempfile.TemporaryDirectory() as target:
        for requirement in requirements:
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"),
                    *("--no-deps", "--ignore-installed", f"--target={target}"),
                    *("--only-binary=:all:", f"--python-version={PYTHON_VERSION}"),
                    *(*platforms, f"--platform=manylinux2014_{architecture}", requirement),
                ],
                capture_output=True,
                text=True,
                timeout=_SECONDS_A_PACKAGE,
            )
            if done.returncode:
                (why,) = re.findall(r"^ERROR: (Could not .*)$", done.stderr, re.M) or [done.stderr]
                yield requirement, why


if __name__ == "__main__":
    main(*sys.argv[1:])
