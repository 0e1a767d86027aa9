"""What the user may choose about model, training and service; the fields are command-line options.

Importing this module is cheap: the command line needs it for ``--help``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from data_plane.transports import TransportName
from distca.contract.timeouts import check_order, known_timeouts

_MODEL, _TRAINING, _SERVICE = "Model", "Training", "Service"


class Precision(StrEnum):
    """Dtype of weights, activations and core attention."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class PlacementName(StrEnum):
    """Where core attention runs."""

    POOL = "pool"
    IN_PLACE = "in-place"
    MIXED = "mixed"


class DeviceName(StrEnum):
    """What a trainer computes on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Sharding(StrEnum):
    """How weights, gradients and optimiser are kept."""

    REPLICATED = "replicated"
    FSDP = "fsdp"


class Preset(StrEnum):
    """Models whose sizes are known by name; their weights are random."""

    LLAMA_3_8B = "llama-3-8b"


class Homes(StrEnum):
    """Which rank holds which tokens of a step."""

    PACKED = "packed"
    PLANNED = "planned"


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model: a small Llama by sizes, or any causal language model of transformers by JSON."""

    model_config: Annotated[
        Path | None,
        typer.Option(
            help="transformers configuration (config.json) instead of the sizes below.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    model_preset: Annotated[
        Preset | None,
        typer.Option(
            help="Sizes of a known model instead of those below; its weights are random.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    model_layers: Annotated[
        int | None,
        typer.Option(
            help="Fewer (or more) layers than the preset or the configuration has.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    hidden_size: Annotated[
        int, typer.Option(help="Width of the model.", rich_help_panel=_MODEL)
    ] = 128
    layers: Annotated[int, typer.Option(help="Layers.", rich_help_panel=_MODEL)] = 4
    heads: Annotated[int, typer.Option(help="Query heads.", rich_help_panel=_MODEL)] = 4
    kv_heads: Annotated[int, typer.Option(help="Key and value heads.", rich_help_panel=_MODEL)] = 2
    dtype: Annotated[
        Precision,
        typer.Option(help="Of weights, activations and attention.", rich_help_panel=_MODEL),
    ] = Precision.FLOAT32

    def __post_init__(self) -> None:
        for name in ("hidden_size", "layers", "heads", "kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.model_layers is not None:
            if self.model_layers < 1:
                raise ValueError(f"model_layers is {self.model_layers}; it must be 1 or more")
            if self.model_config is None and self.model_preset is None:
                raise ValueError(
                    "model_layers goes with model_preset or model_config; without them the "
                    "model has --layers layers"
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
        """What suits the small Llama diverges on models of the size that others train."""
        is_small = self.model_preset is None and self.model_config is None
        return 3e-3 if is_small else 3e-4


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Steps, batch, optimiser and checkpoints."""

    steps: Annotated[
        int,
        typer.Option(
            help="Steps in all, those before a resume included.", rich_help_panel=_TRAINING
        ),
    ] = 16
    tokens_per_rank: Annotated[
        int,
        typer.Option(help="Tokens of each rank in a step.", rich_help_panel=_TRAINING),
    ] = 4096
    nano_batches: Annotated[
        int,
        typer.Option(
            help="Nano-batches that take turns (2 is ping-pong, 1 is without).",
            rich_help_panel=_TRAINING,
        ),
    ] = 2
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="Of AdamW, after warm-up; default: 3e-4 with --model-preset or --model-config, "
            "3e-3 for the small Llama.",
            rich_help_panel=_TRAINING,
        ),
    ] = None
    warmup_steps: Annotated[
        int,
        typer.Option(help="Steps over which the learning rate rises.", rich_help_panel=_TRAINING),
    ] = 4
    weight_decay: Annotated[float, typer.Option(help="Of AdamW.", rich_help_panel=_TRAINING)] = 0.1
    max_gradient_norm: Annotated[
        float, typer.Option(help="Gradients are clipped to this norm.", rich_help_panel=_TRAINING)
    ] = 1.0
    sharding: Annotated[
        Sharding | None,
        typer.Option(
            help="Whether every rank holds all weights, or FSDP2 spreads them; default: fsdp on "
            "CUDA devices, replicated on the CPU.",
            rich_help_panel=_TRAINING,
        ),
    ] = None
    activation_checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--activation-checkpointing/--no-activation-checkpointing",
            help="Recompute the layers in the backward pass, but for core attention; default: on "
            "CUDA devices.",
            rich_help_panel=_TRAINING,
        ),
    ] = None
    host_barriers: Annotated[
        bool | None,
        typer.Option(
            "--host-barriers/--no-host-barriers",
            help="Launch collectives only once all ranks have come to them, so that none can keep "
            "a server from answering; default: on CUDA devices.",
            rich_help_panel=_TRAINING,
        ),
    ] = None
    compile_layers: Annotated[
        bool,
        typer.Option(
            "--compile-layers/--no-compile-layers",
            help="Compile normalisation, rotary embeddings and feed-forward parts of the layers.",
            rich_help_panel=_TRAINING,
        ),
    ] = False
    loss_chunk_tokens: Annotated[
        int,
        typer.Option(
            help="Rows whose logits exist at the same time; logits of a batch are never whole.",
            rich_help_panel=_TRAINING,
        ),
    ] = 8192
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Compare loss and every gradient of each step with local attention; fail if they "
            "differ.",
            rich_help_panel=_TRAINING,
        ),
    ] = False
    checkpoint_every: Annotated[
        int,
        typer.Option(
            help="Steps between checkpoints; one is always saved at the end.",
            rich_help_panel=_TRAINING,
        ),
    ] = 100
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--no-resume",
            help="Go on from the newest checkpoint in the run folder.",
            rich_help_panel=_TRAINING,
        ),
    ] = False

    def __post_init__(self) -> None:
        for name, least in (
            ("steps", 1),
            ("nano_batches", 1),
            ("warmup_steps", 0),
            ("checkpoint_every", 1),
            ("loss_chunk_tokens", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {least} or more")
        for name in ("learning_rate", "max_gradient_norm"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; it must be a number above 0")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ValueError(f"weight_decay is {self.weight_decay}; it must be 0 or more")
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

    def learning_rate_at(self, step: int) -> float:
        """Rises linearly over the warm-up steps, then stays; ``learning_rate`` must be given."""
        assert self.learning_rate is not None
        return self.learning_rate * min(1.0, (step + 1) / (self.warmup_steps + 1))


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """How core attention is planned."""

    tolerance: Annotated[
        float,
        typer.Option(
            help="By how much the busiest server may exceed the mean load.",
            rich_help_panel=_SERVICE,
        ),
    ] = 0.03
    planner: Annotated[
        str,
        typer.Option(
            help="Name of the planner; default: the control plane's.", rich_help_panel=_SERVICE
        ),
    ] = ""
    min_forward_tokens: Annotated[
        int,
        typer.Option(
            help="Shortest piece that a document is cut into, forward; 0: the planner's default.",
            rich_help_panel=_SERVICE,
        ),
    ] = 0
    min_backward_tokens: Annotated[
        int,
        typer.Option(help="The same for the backward pass.", rich_help_panel=_SERVICE),
    ] = 0
    homes: Annotated[
        Homes,
        typer.Option(
            help="Which rank holds which tokens: as packed, or planned so that the fewest bytes "
            "move (the same documents; for in-place and mixed).",
            rich_help_panel=_SERVICE,
        ),
    ] = Homes.PACKED
    steps_ahead: Annotated[
        int,
        typer.Option(
            help="Steps whose manifests are sent ahead, so that plans are ready when needed.",
            rich_help_panel=_SERVICE,
        ),
    ] = 3

    def __post_init__(self) -> None:
        if not (math.isfinite(self.tolerance) and self.tolerance >= 0):
            raise ValueError(f"tolerance is {self.tolerance}; it must be 0 or more")
        for name, least in (
            ("min_forward_tokens", 0),
            ("min_backward_tokens", 0),
            ("steps_ahead", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {least} or more")


@dataclass(frozen=True, kw_only=True)
class IntegritySettings:
    """What is done against silent corruption."""

    checksums: Annotated[
        bool,
        typer.Option(
            "--checksums/--no-checksums",
            help="Every message between trainers and servers carries a checksum.",
            rich_help_panel=_SERVICE,
        ),
    ] = False
    check_results: Annotated[
        bool | None,
        typer.Option(
            "--check-results/--no-check-results",
            help="Look for NaN and Inf in servers' results; default: on the CPU.",
            rich_help_panel=_SERVICE,
        ),
    ] = None
    audit: Annotated[
        float,
        typer.Option(
            metavar="RATE",
            help="Share of the servers' tasks that trainers recompute and compare, 0 to 1.",
            rich_help_panel=_SERVICE,
        ),
    ] = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.audit <= 1:
            raise ValueError(f"audit is {self.audit}; it must be a share, 0 to 1")


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """Where the service is and which run this is; only a trainer process takes these."""

    control_plane: Annotated[
        str,
        typer.Option(
            help="host:port of the control plane.",
            envvar="DISTCA_CONTROL_PLANE",
            rich_help_panel=_SERVICE,
        ),
    ]
    placement: Annotated[
        PlacementName,
        typer.Option(help="Where core attention runs.", rich_help_panel=_SERVICE),
    ] = PlacementName.POOL
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
            help="Address of this machine for UCX traffic of an in-place server.",
            rich_help_panel=_SERVICE,
        ),
    ] = "127.0.0.1"
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
            "pool's servers, or what suits this machine's devices.",
            rich_help_panel=_SERVICE,
        ),
    ] = TransportName.AUTO
    one_host: Annotated[
        bool,
        typer.Option(
            "--one-host/--several-hosts",
            help="Whether all ranks and servers are on this machine: then they use shared memory.",
            rich_help_panel=_SERVICE,
        ),
    ] = False
    start_timeout_seconds: Annotated[
        float,
        typer.Option(help="To reach the control plane at start.", rich_help_panel=_SERVICE),
    ] = 180.0
    connect_timeout_seconds: Annotated[
        float,
        typer.Option(help="To reach a server.", rich_help_panel=_SERVICE),
    ] = 20.0
    plan_timeout_seconds: Annotated[
        float, typer.Option(help="A step waits this long for its plan.", rich_help_panel=_SERVICE)
    ] = 60.0
    tick_timeout_seconds: Annotated[
        float,
        typer.Option(
            help="One exchange with the servers may take this long.", rich_help_panel=_SERVICE
        ),
    ] = 120.0
    recovery_timeout_seconds: Annotated[
        float,
        typer.Option(
            help="A step that lost a server waits this long for its new plan.",
            rich_help_panel=_SERVICE,
        ),
    ] = 60.0
    control_plane_timeout_seconds: Annotated[
        float,
        typer.Option(
            help="Training goes on this long without a control plane.", rich_help_panel=_SERVICE
        ),
    ] = 300.0
    metrics_port: Annotated[
        int | None,
        typer.Option(
            help="Port of /metrics for Prometheus of the first rank on a host; each further one "
            "(LOCAL_RANK) takes the next. 0: any free one. Default: none is served.",
            envvar="DISTCA_METRICS_PORT",
            rich_help_panel=_SERVICE,
        ),
    ] = None
    min_gigabytes_per_second: Annotated[
        float,
        typer.Option(
            help="A server reached more slowly than this is warned of; 0: no floor.",
            rich_help_panel=_SERVICE,
        ),
    ] = 0.0
    rendezvous: Annotated[
        str,
        typer.Option(
            help="How the ranks find each other, as in torch.distributed: env:// reads what "
            "torchrun sets.",
            rich_help_panel=_SERVICE,
        ),
    ] = "env://"

    def __post_init__(self) -> None:
        for name in (
            "start_timeout_seconds",
            "connect_timeout_seconds",
            "plan_timeout_seconds",
            "tick_timeout_seconds",
            "recovery_timeout_seconds",
            "control_plane_timeout_seconds",
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; it must be a number above 0")
        check_order(known_timeouts(self))
        if self.metrics_port is not None and not 0 <= self.metrics_port < 2**16:
            raise ValueError(f"metrics_port is {self.metrics_port}; it must be 0 to 65535")

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
