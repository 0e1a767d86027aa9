"""Feeds malformed inputs to everything that listens.

python -m tests.service.fuzz                          # 1,000,000 inputs
python -m tests.service.fuzz --count 30000 --seed 7
python -m tests.service.fuzz --target ticks --first 4000 --count 123
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import traceback

from tests.service.fuzz.harness import Broken, limited_memory, run
from tests.service.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.service.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000, help="inputs in all")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--target", choices=sorted(TARGETS), help="only this one")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    chosen = parser.parse_args()
    # Refusals are logged once a change of state; a million inputs make many of them.
    logging.disable(logging.CRITICAL)
    print(f"seed {chosen.seed}", flush=True)
    targets = [TARGETS[chosen.target]] if chosen.target else list(TARGETS.values())
    total = sum(target.share for target in targets)
    fed = 0
    with limited_memory():
        for target in targets:
            count = round(chosen.count * target.share / total)
            try:
                result = run(target, chosen.seed, count, chosen.first)
            except Broken as broken:
                traceback.print_exception(broken.__cause__)
                print(broken, file=sys.stderr)
                return 1
            fed += result.inputs
            print(f"{target.name}: {result}", flush=True)
    print(f"{fed} malformed inputs, nothing broke")
    return 0


if __name__ == "__main__":
    sys.exit(main())
