"""``python -m distca``, and ``torchrun -m distca train ...``."""

from __future__ import annotations

from distca.cli import main

if __name__ == "__main__":
    main()
