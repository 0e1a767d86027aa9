"""Options of model, training and service; the fields are command-line options.

Importing this module is cheap: the command line needs it for ``--help``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from data_plane.interfaces import OWN_ADDRESS, rows_host, source_towards
from data_plane.transport import TransportName
from distca.apps.data.settings import DataSettings, Homes
from distca.contract.addresses import hosts_of
from distca.contract.checks import (
    check_host,
    check_least,
    check_port,
    check_positive,
    check_seconds,
)
from distca.contract.identity import check_name
from distca.contract.settings import Placement, PlanRequest, RankTimeouts
from distca.contract.timeouts import check_order, known_timeouts
from distca.errors import SettingsError

_TRAINING = "Training"


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


class Preset(StrEnum):
    """Models whose sizes are known by name; their weights are random."""

    LLAMA_3_8B = "llama-3-8b"


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model: a small Llama by sizes, or any causal language model of transformers by JSON."""

    PANEL: ClassVar = "Model"

    model_config: Annotated[
        Path | None,
        typer.Option(help="transformers configuration (config.json) instead of the sizes below."),
    ] = None
    model_preset: Annotated[
        Preset | None,
        typer.Option(help="Sizes of a known model instead of those below; its weights are random."),
    ] = None
    model_layers: Annotated[
        int | None,
        typer.Option(help="Fewer (or more) layers than the preset or the configuration has."),
    ] = None
    hidden_size: Annotated[int, typer.Option(help="Width of the model.")] = 128
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 4
    heads: Annotated[int, typer.Option(help="Number of query heads.")] = 4
    kv_heads: Annotated[int, typer.Option(help="Number of key and value heads.")] = 2
    dtype: Annotated[
        Precision, typer.Option(help="Data type of weights, activations and attention.")
    ] = Precision.FLOAT32

    def __post_init__(self) -> None:
        check_least(self, hidden_size=1, layers=1, heads=1, kv_heads=1, model_layers=1)
        has_own_sizes = self.model_config is None and self.model_preset is None
        if self.model_layers is not None and has_own_sizes:
            raise ValueError(
                "model_layers goes with model_preset or model_config; without them the model has "
                "--layers layers"
            )
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} is no multiple of twice the heads "
                f"({2 * self.heads}): rotary embeddings need an even head dim"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")

    @property
    def default_learning_rate(self) -> float:
        """The default learning rate: the small Llama's diverges on larger models."""
        is_small = self.model_preset is None and self.model_config is None
        return 3e-3 if is_small else 3e-4


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Steps, batch, optimiser and checkpoints."""

    PANEL: ClassVar = "Training"

    steps: Annotated[int, typer.Option(help="Steps in all, those before a resume included.")] = 16
    tokens_per_rank: Annotated[int, typer.Option(help="Tokens of each rank in a step.")] = 4096
    nano_batches: Annotated[
        int, typer.Option(help="Nano-batches that take turns (2 is ping-pong, 1 is without).")
    ] = 2
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="Learning rate of AdamW, after warm-up; default: 3e-4 with --model-preset or "
            "--model-config, 3e-3 for the small Llama."
        ),
    ] = None
    warmup_steps: Annotated[int, typer.Option(help="Steps over which the learning rate rises.")] = 4
    weight_decay: Annotated[float, typer.Option(help="Weight decay of AdamW.")] = 0.1
    max_gradient_norm: Annotated[
        float, typer.Option(help="Gradients are clipped to this norm.")
    ] = 1.0
    sharding: Annotated[
        Sharding | None,
        typer.Option(
            help="Whether every rank holds all weights, or FSDP2 spreads them; default: fsdp on "
            "CUDA devices, replicated on the CPU."
        ),
    ] = None
    activation_checkpointing: Annotated[
        bool | None,
        typer.Option(
            help="Recompute the layers in the backward pass, but for core attention; default: on "
            "CUDA devices."
        ),
    ] = None
    compile_layers: Annotated[
        bool,
        typer.Option(
            help="Compile normalisation, rotary embeddings and feed-forward parts of the layers."
        ),
    ] = False
    loss_chunk_tokens: Annotated[
        int,
        typer.Option(
            help="Rows whose logits exist at the same time; logits of a batch are never whole."
        ),
    ] = 8192
    verify: Annotated[
        bool,
        typer.Option(
            help="Compare loss and every gradient of each step with local attention; fail if they "
            "differ."
        ),
    ] = False
    verify_every: Annotated[
        int,
        typer.Option(
            help="With --verify: steps from one that is compared to the next; the first and the "
            "last always are."
        ),
    ] = 1
    checkpoint_every: Annotated[
        int, typer.Option(help="Steps between checkpoints; one is always saved at the end.")
    ] = 100
    resume: Annotated[
        bool, typer.Option(help="Go on from the newest checkpoint in the run folder.")
    ] = False
    resume_or_start: Annotated[
        bool,
        typer.Option(
            "--resume-or-start",
            help="The same, but begin at the first step if there is no checkpoint yet: for jobs "
            "that a cluster starts again.",
        ),
    ] = False

    def __post_init__(self) -> None:
        check_least(
            self,
            steps=1,
            verify_every=1,
            nano_batches=1,
            warmup_steps=0,
            checkpoint_every=1,
            loss_chunk_tokens=1,
            weight_decay=0,
        )
        check_positive(self, "learning_rate", "max_gradient_norm")
        rows, rest = divmod(self.tokens_per_rank, self.nano_batches)
        if rest or rows < 2:
            raise ValueError(
                f"tokens_per_rank is {self.tokens_per_rank}; it must be a multiple of "
                f"nano_batches ({self.nano_batches}) and at least {2 * self.nano_batches}"
            )

    @property
    def nano_batch_tokens(self) -> int:
        """Rows of one nano-batch on one rank."""
        return self.tokens_per_rank // self.nano_batches

    def is_verified(self, step: int) -> bool:
        """True if the step is compared with local attention."""
        return self.verify and (step % self.verify_every == 0 or step == self.steps - 1)

    def learning_rate_at(self, step: int) -> float:
        """Rises linearly over the warm-up steps, then stays; ``learning_rate`` must be given."""
        assert self.learning_rate is not None
        return self.learning_rate * min(1.0, (step + 1) / (self.warmup_steps + 1))


@dataclass(frozen=True, kw_only=True)
class PlanSettings(PlanRequest):
    """Options of planning core attention."""

    PANEL: ClassVar = "Service"

    homes: Annotated[
        Homes,
        typer.Option(
            help="Which rank holds which tokens: as packed, or planned so that the fewest bytes "
            "move (the same documents; for in-place and mixed)."
        ),
    ] = Homes.PACKED
    steps_ahead: Annotated[
        int,
        typer.Option(
            help="Steps whose manifests are sent ahead, so that plans are ready when needed."
        ),
    ] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, steps_ahead=1)


@dataclass(frozen=True, kw_only=True)
class ServiceSettings(RankTimeouts):
    """The service and the run; only a trainer process takes these."""

    PANEL: ClassVar = "Service"

    control_plane: Annotated[
        str, typer.Option(help="host:port of the control plane.", envvar="DISTCA_CONTROL_PLANE")
    ]
    placement: Annotated[Placement, typer.Option(help="Where core attention runs.")] = (
        Placement.POOL
    )
    device: Annotated[
        DeviceName,
        typer.Option(
            help="cuda: device LOCAL_RANK of this host, gradients over NCCL; auto: cuda where "
            "there is one.",
            rich_help_panel=_TRAINING,
        ),
    ] = DeviceName.AUTO
    data_host: Annotated[
        str,
        typer.Option(
            help="Address of this machine at which other ranks reach it; auto: the one towards the "
            "control plane, loopback with --one-host.",
        ),
    ] = OWN_ADDRESS
    data_interface: Annotated[
        str,
        typer.Option(
            help="Network interface whose IPv4 address is that, for example net1, instead of "
            "--data-host.",
        ),
    ] = ""
    run_dir: Annotated[
        Path,
        typer.Option(
            help="Folder for checkpoints, step log and report, the same on every rank; its name "
            "is the job's.",
            rich_help_panel=_TRAINING,
        ),
    ]
    transport: Annotated[
        TransportName,
        typer.Option(
            help="What moves the rows; the same for all processes of a job. auto: that of the "
            "pool's servers, or what suits this machine's devices."
        ),
    ] = TransportName.AUTO
    replace: Annotated[
        bool, typer.Option("--replace", help="End a live job of this name and take its place.")
    ] = False
    one_host: Annotated[
        bool,
        typer.Option(
            "--one-host/--several-hosts",
            help="Whether all ranks and servers are on this machine: then they use shared memory.",
        ),
    ] = False
    metrics_port: Annotated[
        int | None,
        typer.Option(
            help="Port of /metrics of the first rank on a host; the others (LOCAL_RANK) take the "
            "next ones. 0: any free one. Default: none.",
            envvar="DISTCA_METRICS_PORT",
        ),
    ] = None
    min_gigabytes_per_second: Annotated[
        float,
        typer.Option(help="A server reached more slowly than this is warned of; 0: no floor."),
    ] = 0.0
    rendezvous: Annotated[
        str,
        typer.Option(
            help="How the ranks find each other, as in torch.distributed: env:// reads what "
            "torchrun sets."
        ),
    ] = "env://"

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


def check_together(
    data: DataSettings, training: TrainingSettings, homes: Homes, placement: Placement
) -> None:
    """Checks settings that do not all go with one another.

    Raises:
        SettingsError: two contradict each other.
    """
    if data.cut_documents and training.nano_batches != 2:
        raise SettingsError(
            f"--cut-documents goes with two nano-batches, and --nano-batches is "
            f"{training.nano_batches}; leave one of both out"
        )
    if homes is Homes.PLANNED and placement is Placement.POOL:
        raise SettingsError(
            "--homes planned goes with placement in-place or mixed: in a pool all rows travel; "
            "choose one of these, or --homes packed"
        )
