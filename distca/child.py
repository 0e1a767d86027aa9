"""Runs a distca command in a process that dies with the one that started it.

``python -m distca.child PARENT_PID ARGUMENTS...``: the kernel kills this process as soon as
its parent is gone, however that ended, so that no local run leaves processes behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel for SIGKILL when the parent dies; exits if it is dead already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have died before the call: then the signal never comes.
    if os.getppid() != parent_pid:
        os._exit(1)


def main() -> None:
    """Ties this process to its parent and becomes the command."""
    die_with_parent(int(sys.argv[1]))
    # The parent interrupts it, also where it was itself started to ignore that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from distca.cli import main as run

    sys.argv = ["distca", *sys.argv[2:]]
    run()


if __name__ == "__main__":
    main()
