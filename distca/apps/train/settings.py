"""Options of model, training and service; the fields are command-line options.

Importing this module is cheap: the command line needs it for ``--help``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from core_attention.shape import AttentionShape
from data_plane.interfaces import OWN_ADDRESS, rows_host, source_towards
from data_plane.transport import TransportName
from distca.contract.addresses import hosts_of
from distca.contract.checks import (
    check_host,
    check_least,
    check_port,
    check_positive,
    check_seconds,
)
from distca.contract.identity import check_name
from distca.contract.settings import Placement, RankTimeouts
from distca.contract.timeouts import check_order, known_timeouts
from distca.options import option

_TRAINING = "Training"

WARMUP_STEPS = 4
"""Steps over which the learning rate rises."""


class Precision(StrEnum):
    """Dtype of weights, activations and core attention."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class DeviceName(StrEnum):
    """The kinds of devices of a trainer."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Sharding(StrEnum):
    """Ways to keep weights, gradients and optimiser."""

    REPLICATED = "replicated"
    FSDP = "fsdp"


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The sizes of a small Llama."""

    PANEL: ClassVar = "Model"

    hidden_size: int = option(128, "Width of the model.")
    layers: int = option(4, "Number of layers.")
    heads: int = option(4, "Number of query heads.")
    kv_heads: int = option(2, "Number of key and value heads.")
    dtype: Precision = option(Precision.FLOAT32, "Data type of weights, activations and attention.")

    def __post_init__(self) -> None:
        check_least(self, hidden_size=1, layers=1, heads=1, kv_heads=1)
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} is no multiple of twice the heads "
                f"({2 * self.heads}): rotary embeddings need an even head dim"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")

    @property
    def shape(self) -> AttentionShape:
        """The heads, head dims and dtype of its core attention."""
        head_dim = self.hidden_size // self.heads
        return AttentionShape(
            num_heads=self.heads,
            num_heads_kv=self.kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim,
            dtype=self.dtype.value,
        )


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Source of the documents and how they are cut."""

    PANEL: ClassVar = "Data"

    data: Path | None = option(
        None,
        "Folder of text files, one document a file. Default: the sources of Python's "
        "standard library.",
    )
    max_document_tokens: int | None = option(
        None, "Longer documents are cut into pieces of at most this many tokens. Default: a rank's."
    )
    seed: int = option(0, "Order of the documents and first weights.")

    def __post_init__(self) -> None:
        # A single token predicts nothing.
        check_least(self, max_document_tokens=2, seed=0)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Steps, batch, optimiser and checkpoints."""

    PANEL: ClassVar = "Training"

    steps: int = option(16, "Steps in all, those before a resume included.")
    tokens_per_rank: int = option(4096, "Tokens of each rank in a step.")
    learning_rate: float = option(3e-3, "Of AdamW, after the first steps.")
    sharding: Sharding | None = option(
        None,
        "Whether every rank holds all weights, or FSDP2 spreads them; default: fsdp on "
        "CUDA devices, replicated on the CPU.",
    )
    verify: bool = option(
        False,
        "Compare loss and every gradient of each step with local attention; fail if they differ.",
    )
    verify_every: int = option(
        1,
        "With --verify: steps from one that is compared to the next; the first and the "
        "last always are.",
    )
    checkpoint_every: int = option(
        100, "Steps between checkpoints; one is always saved at the end."
    )
    resume: bool = option(False, "Go on from the newest checkpoint in the run folder.")
    resume_or_start: bool = option(
        False,
        "The same, but begin at the first step if there is no checkpoint yet: for jobs "
        "that a cluster starts again.",
        "--resume-or-start",
    )

    def __post_init__(self) -> None:
        check_least(self, steps=1, tokens_per_rank=2, verify_every=1, checkpoint_every=1)
        check_positive(self, "learning_rate")

    def is_verified(self, step: int) -> bool:
        """True if the step is compared with local attention."""
        return self.verify and (step % self.verify_every == 0 or step == self.steps - 1)

    def learning_rate_at(self, step: int) -> float:
        """Rises linearly over the first steps, then stays."""
        return self.learning_rate * min(1.0, (step + 1) / (WARMUP_STEPS + 1))


@dataclass(frozen=True, kw_only=True)
class ServiceSettings(RankTimeouts):
    """The service and the run; only a trainer process takes these."""

    PANEL: ClassVar = "Service"

    control_plane: Annotated[
        str, typer.Option(help="host:port of the control plane.", envvar="DISTCA_CONTROL_PLANE")
    ]
    placement: Placement = option(Placement.POOL, "Where core attention runs.")
    device: DeviceName = option(
        DeviceName.AUTO,
        "cuda: device LOCAL_RANK of this host, gradients over NCCL; auto: cuda where there is one.",
        rich_help_panel=_TRAINING,
    )
    data_host: str = option(
        OWN_ADDRESS,
        "Address of this machine at which other ranks reach it; auto: the one towards the "
        "control plane, loopback with --one-host.",
    )
    data_interface: str = option(
        "",
        "Network interface whose IPv4 address is that, for example net1, instead of --data-host.",
    )
    run_dir: Annotated[
        Path,
        typer.Option(
            help="Folder for checkpoints, step log and report, the same on every rank; its name "
            "is the job's.",
            rich_help_panel=_TRAINING,
        ),
    ]
    transport: TransportName = option(
        TransportName.AUTO,
        "What moves the rows; the same for all processes of a job. auto: that of the "
        "pool's servers, or what suits this machine's devices.",
    )
    replace: bool = option(False, "End a live job of this name and take its place.", "--replace")
    one_host: bool = option(
        False,
        "Whether all ranks and servers are on this machine: then they use shared memory.",
        "--one-host/--several-hosts",
    )
    metrics_port: int | None = option(
        None,
        "Port of /metrics of the first rank on a host; the others (LOCAL_RANK) take the "
        "next ones. 0: any free one. Default: none.",
        envvar="DISTCA_METRICS_PORT",
    )
    min_gigabytes_per_second: float = option(
        0.0, "A server reached more slowly than this is warned of; 0: no floor."
    )
    rendezvous: str = option(
        "env://",
        "How the ranks find each other, as in torch.distributed: env:// reads what torchrun sets.",
    )

    def __post_init__(self) -> None:
        check_seconds(self)
        check_order(known_timeouts(self))
        check_port(self, "metrics_port")
        check_host(self, "data_host")
        if self.data_host == OWN_ADDRESS:
            object.__setattr__(self, "data_host", self._own_address())
        rows_host(self.data_host, self.data_interface)
        check_name("last part of run_dir, which names the job,", self.run_dir.name)

    def _own_address(self) -> str:
        """Trainers on one machine reach its control plane, and so each other, over
        loopback."""
        control_planes = hosts_of("control_plane", self.control_plane)
        return source_towards(() if self.one_host else control_planes) or "127.0.0.1"

    @property
    def rows_host(self) -> str:
        """The address at which rows are exchanged."""
        return rows_host(self.data_host, self.data_interface)

    @property
    def collective_timeout_seconds(self) -> float:
        """How long a rank waits for another in a collective: longer than all waits for attention
        together, so that the more telling error comes first."""
        return (
            self.start_timeout_seconds
            + self.connect_timeout_seconds
            + self.plan_timeout_seconds
            + self.tick_timeout_seconds
            + self.recovery_timeout_seconds
            + self.control_plane_timeout_seconds
            + 30.0
        )
