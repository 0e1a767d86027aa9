"""Runs pytest; the few tests that fail beside others run once more, alone.

    python -m tools.run_tests --again 3 -- tests --numprocesses=2

On a busy machine a test that waits for other processes may run out of its time through no fault of
the product. A second run with nothing beside it tells such a test from a defect. What passes alone
is named: its wait is too short, or what it tests has a race. More failures than ``--again`` are not
run again, nor is anything after an interruption.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--again", type=int, default=3, help="run up to so many failures again")
    parser.add_argument("pytest", nargs="*", help="options and paths for pytest, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="distca-tests-") as folder:
        cache = ("-o", f"cache_dir={folder}")
        code = run([*options.pytest, *cache])
        failed = failed_tests(Path(folder))
        if code != pytest.ExitCode.TESTS_FAILED or not 0 < len(failed) <= options.again:
            return code
        print(f"\n== once more, alone: {', '.join(failed)}", flush=True)
        code = run([*failed, *cache])
        if code == pytest.ExitCode.OK:
            print("== passed alone, to be mended: " + ", ".join(failed), flush=True)
        return code


def run(arguments: list[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


def failed_tests(cache: Path) -> list[str]:
    """The names of the tests that failed last; none if pytest could not say."""
    path = cache / "v" / "cache" / "lastfailed"
    try:
        return list(json.loads(path.read_text()))
    except FileNotFoundError:
        return []


if __name__ == "__main__":
    sys.exit(main())
