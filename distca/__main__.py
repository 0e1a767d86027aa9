"""The command: ``distca``, ``python -m distca``, and ``torchrun -m distca train ...``."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; see :func:`distca.cli.main`. Ctrl-C ends it while it is being loaded,
    too."""
    try:
        from distca import cli
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
