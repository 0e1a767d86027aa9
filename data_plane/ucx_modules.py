"""What the UCX that ucxx loads can do, found out in a process of its own: one that loads it can
open no other transport."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Final

_SECONDS: Final = 30.0
"""Loading takes 0.1 s on a machine that has nothing else to do."""

_LOAD = """
try:
    import libucx
    libucx.load_library()
except ImportError:
    import ucxx
for line in open("/proc/self/maps"):
    path = line.split()[-1]
    if path.rpartition("/")[2].startswith("libucs.so"):
        print(path)
        break
"""
"""ucxx itself loads the library by libucx, where the wheels brought that."""


@cache
def ucx_modules() -> frozenset[str] | None:
    """Transports that the UCX of ucxx loads as modules, for example ``{"cuda", "ib"}``; TCP and
    shared memory are built in. None if it cannot be loaded."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOAD],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    path = done.stdout.strip()
    if done.returncode or not path:
        return None
    names = (module.name for module in (Path(path).parent / "ucx").glob("libuct_*.so*"))
    found = (re.match(r"libuct_([a-z]+)", name) for name in names)
    return frozenset(match[1] for match in found if match)
