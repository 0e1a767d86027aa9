"""torchtitan and Megatron-core, served beside their own attention: steps, tokens, memory, loss.

    python -m benchmarks.gpu.frameworks                  # 2 or 4 GPUs; the shape of Llama-3-8B
    python -m benchmarks.gpu.frameworks --framework torchtitan --attention served,varlen,flex_flash

With two GPUs data parallelism; with four, also two pipeline stages, and tensor parallelism of two,
each with two replicas. All ways of one layout run the same random documents. torchtitan's pipelines
need torch 2.14 or newer, Megatron's own packed attention (``transformer-engine``) that package.

*served* is balanced, *served-one-lane* likewise, without ping-pong; *served-at-documents* cuts
torchtitan's batches in two at the begin of a document; *plain* runs the same code and leaves all
core attention at home. *Headroom* is how much faster plain packing would be if core attention were
spread evenly, as forecast; pipelines have a formula of their own, see ``benchmarks.gpu.pipeline``.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.frameworks_rank import Settings

WAYS = {
    "torchtitan": "plain,served,served-at-documents,varlen",
    "megatron": "plain,served,served-one-lane",
}
LAYOUTS = {2: [(1, 1)], 4: [(1, 1), (2, 1), (1, 2)]}
"""Pipeline stages and tensor-parallel ranks, by the number of GPUs."""

WARM_UP_STEPS = 3

TINY: dict[str, Any] = {
    "flavor": "debugmodel",
    "hidden": 64,
    "heads": 4,
    "heads_kv": 2,
    "ffn": 128,
    "dtype": "float32",
}
"""Of :class:`Settings`, for a try on CPUs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--framework", default="torchtitan,megatron")
    parser.add_argument(
        "--attention",
        help="ways with commas between: "
        + "; ".join(f"{ways} of {framework}" for framework, ways in WAYS.items())
        + ", and the framework's others",
    )
    parser.add_argument("--gpus", type=int, choices=sorted(LAYOUTS), default=2)
    parser.add_argument(
        "--layouts", help="pipeline stages x tensor-parallel ranks, with commas between, as 1x1,2x1"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=131072, help="of a rank's microbatch")
    parser.add_argument(
        "--microbatches", type=int, default=4, help="of a step, of Megatron-core and in pipelines"
    )
    parser.add_argument(
        "--median", type=int, help="of documents' lengths; a sixteenth of a microbatch by default"
    )
    parser.add_argument(
        "--vocabulary",
        type=int,
        help="of torchtitan's model; with torch before 2.13 its loss has all logits at once, which "
        "a smaller vocabulary leaves room for",
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="a small model, for a try on CPUs")
    chosen = parser.parse_args()
    if chosen.steps <= WARM_UP_STEPS:
        parser.error(f"--steps is {chosen.steps}; it must be more than {WARM_UP_STEPS}")
    layouts = LAYOUTS[chosen.gpus]
    if chosen.layouts:
        layouts = [_layout(parser, text, chosen.gpus) for text in chosen.layouts.split(",")]
    table = Table(
        "framework", "layout", "attention", "s a step", "tokens/s", "over plain, of headroom",
        "peak GiB", "losses",
    )  # fmt: skip
    with _control_plane() as address:
        for framework in chosen.framework.split(","):
            for pp, tp in layouts:
                plain: Found | None = None
                for way in (chosen.attention or WAYS[framework]).split(","):
                    settings = Settings(
                        framework=framework,
                        attention=way,
                        control_plane=address,
                        job=f"{framework}-pp{pp}-tp{tp}-{time.time_ns()}",
                        pp=pp,
                        tp=tp,
                        layers=chosen.layers,
                        tokens=chosen.tokens,
                        microbatches=chosen.microbatches,
                        median=chosen.median,
                        steps=chosen.steps,
                        vocabulary=chosen.vocabulary,
                        **(TINY if chosen.tiny else {}),
                    )
                    found = _run(settings, chosen.gpus)
                    if way == "plain":
                        plain = found
                    cells = ["failed", "", "", "", ""] if found is None else found.cells(plain)
                    row = (framework, f"PP {pp} TP {tp}", way, *cells)
                    # A way takes minutes: what is found is not lost with those that follow.
                    print(" | ".join(row), flush=True)
                    table.add_row(*row)
    Console(width=200).print(table)


def _layout(parser: argparse.ArgumentParser, text: str, gpus: int) -> tuple[int, int]:
    """Pipeline stages and tensor-parallel ranks, of ``1x2``."""
    pp, _, tp = text.partition("x")
    if not (
        pp.isdecimal() and tp.isdecimal() and int(pp) * int(tp) and not gpus % (int(pp) * int(tp))
    ):
        parser.error(
            f"--layouts has {text!r}; it must be stages x tensor-parallel ranks, as 2x1, whose "
            f"product divides the {gpus} GPUs"
        )
    return int(pp), int(tp)


@dataclass(frozen=True, kw_only=True)
class Found:
    """One way of one layout, without the warm-up.

    Attributes:
        seconds: of each step, by the slowest rank.
        over: of each step, what plain packing loses to imbalance, in seconds; as
            :class:`benchmarks.gpu.frameworks_rank.Measured` has it; empty if unknown.
        tokens: of a step.
        losses: of all steps, the warm-up as well.
        peak_bytes: of the rank with most.
    """

    seconds: list[float]
    over: list[float]
    tokens: int
    losses: list[float]
    peak_bytes: int

    def cells(self, plain: Found | None) -> list[str]:
        """Of the table; ``plain`` is plain packing in the same layout, None if it did not run."""
        mean = statistics.mean(self.seconds)
        against = ""
        if plain is not None:
            gains = [p / own for p, own in zip(plain.seconds, self.seconds, strict=True)]
            against = f"{statistics.mean(gains):.3f}x"
            if plain.over:
                rooms = [p / (p - over) for p, over in zip(plain.seconds, plain.over, strict=True)]
                against += f" of {statistics.mean(rooms):.3f}x"
        shown = (self.losses[0], self.losses[len(self.losses) // 2], self.losses[-1])
        return [
            f"{mean:.2f} (" + " ".join(f"{each:.2f}" for each in self.seconds) + ")",
            f"{self.tokens / mean:,.0f}",
            against,
            f"{self.peak_bytes / 2**30:.1f}",
            " ".join(f"{each:.6g}" for each in shown),
        ]


def _run(settings: Settings, gpus: int) -> Found | None:
    """None if a rank failed; its messages are in the output."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(gpus), "-m", "benchmarks.gpu.frameworks_rank"]
        code = subprocess.run([*command, json.dumps(asdict(settings)), folder], check=False)
        if code.returncode:
            return None
        ranks: list[dict[str, Any]] = [
            json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(gpus)
        ]
    steps = [max(times) for times in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    accumulates = settings.framework == "megatron" or settings.pp > 1
    batches = settings.microbatches if accumulates else 1
    return Found(
        seconds=steps[WARM_UP_STEPS:],
        over=ranks[0]["over"][WARM_UP_STEPS:],
        tokens=settings.tokens * batches * gpus // (settings.pp * settings.tp),
        losses=[
            sum(each) / settings.tp for each in zip(*(r["losses"] for r in ranks), strict=True)
        ],
        peak_bytes=max(rank["peak_bytes"] for rank in ranks),
    )


@contextmanager
def _control_plane() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "distca", "control-plane", "--listen", address]
    with tempfile.TemporaryDirectory() as folder:
        running = subprocess.Popen(
            [*command, "--state-dir", folder, "--metrics-listen", "127.0.0.1:0"]
        )
        try:
            yield address
        finally:
            running.terminate()
            running.wait(30)


if __name__ == "__main__":
    main()
