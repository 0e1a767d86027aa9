"""What the user may choose about previews; the fields are command-line options."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from distca.simulator.fleet import Placement

_LENGTHS, _MODEL, _CLUSTER, _PLANNER = "Documents", "Model", "Cluster", "Planner"


class Homes(StrEnum):
    """Who gives documents their homes."""

    PACKED = "packed"
    PLANNED = "planned"


@dataclass(frozen=True, kw_only=True)
class LengthsSettings:
    """Where document lengths come from."""

    lengths: Annotated[
        Path | None,
        typer.Option(
            help="File with the lengths: text (one number a line), .jsonl, .parquet, .npy (lengths "
            "or document bounds) or the .idx of a Megatron-LM data set.",
            rich_help_panel=_LENGTHS,
        ),
    ] = None
    field: Annotated[
        str | None,
        typer.Option(
            help="JSONL field or Parquet column: numbers, lists of token ids, or texts. Default: "
            "the first of the usual names.",
            rich_help_panel=_LENGTHS,
        ),
    ] = None
    bytes_per_token: Annotated[
        float,
        typer.Option(
            help="UTF-8 bytes of a token, to estimate lengths of texts.", rich_help_panel=_LENGTHS
        ),
    ] = 4.0
    distribution: Annotated[
        str | None,
        typer.Option(
            help="Draw lengths instead: prolong or pretrain, like the paper's two data sets.",
            rich_help_panel=_LENGTHS,
        ),
    ] = None
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Longer documents are cut. Default: tokens per rank.", rich_help_panel=_LENGTHS
        ),
    ] = None
    shuffle: Annotated[
        bool,
        typer.Option("--shuffle/--no-shuffle", help="Shuffle a file.", rich_help_panel=_LENGTHS),
    ] = True
    seed: Annotated[
        int, typer.Option(help="Of drawing and shuffling.", rich_help_panel=_LENGTHS)
    ] = 0
    batches: Annotated[
        int, typer.Option(help="Steps that are planned.", rich_help_panel=_LENGTHS)
    ] = 4


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model's shape: a preset, of which single numbers may be changed."""

    model: Annotated[str, typer.Option(help="llama-3-8b or llama-34b.", rich_help_panel=_MODEL)] = (
        "llama-3-8b"
    )
    layers: Annotated[int | None, typer.Option(help="Decoder layers.", rich_help_panel=_MODEL)] = (
        None
    )
    hidden_size: Annotated[
        int | None, typer.Option(help="Width of the residual stream.", rich_help_panel=_MODEL)
    ] = None
    intermediate_size: Annotated[
        int | None, typer.Option(help="Width of the feed-forward layer.", rich_help_panel=_MODEL)
    ] = None
    heads: Annotated[int | None, typer.Option(help="Query heads.", rich_help_panel=_MODEL)] = None
    kv_heads: Annotated[
        int | None, typer.Option(help="Key/value heads.", rich_help_panel=_MODEL)
    ] = None
    head_dim: Annotated[
        int | None, typer.Option(help="Width of a head.", rich_help_panel=_MODEL)
    ] = None
    recompute: Annotated[
        bool,
        typer.Option(
            "--recompute/--no-recompute",
            help="The backward pass runs the linear layers' forward again.",
            rich_help_panel=_MODEL,
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """GPUs, links and kernels."""

    tokens_per_rank: Annotated[
        int, typer.Option(help="Tokens of a rank in a microbatch.", rich_help_panel=_CLUSTER)
    ] = 131072
    tensor_parallel: Annotated[
        int, typer.Option(help="GPUs of a rank.", rich_help_panel=_CLUSTER)
    ] = 8
    gpus_per_host: Annotated[
        int, typer.Option(help="GPUs of a machine.", rich_help_panel=_CLUSTER)
    ] = 8
    bandwidth_gbps: Annotated[
        float,
        typer.Option(help="Network of one GPU, GB/s in each direction.", rich_help_panel=_CLUSTER),
    ] = 50.0
    host_bandwidth_gbps: Annotated[
        float,
        typer.Option(
            help="One GPU to the others of its machine, GB/s in each direction.",
            rich_help_panel=_CLUSTER,
        ),
    ] = 212.0
    latency_us: Annotated[
        float, typer.Option(help="Latency of a message, microseconds.", rich_help_panel=_CLUSTER)
    ] = 22.0
    linear_tflops: Annotated[
        float,
        typer.Option(
            help="Achieved by one GPU in the linear layers, TFLOP/s.", rich_help_panel=_CLUSTER
        ),
    ] = 600.0
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Cost profile of one GPU's kernels, as `distca profile` writes it. Default: an "
            "H200's.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PlannerSettings:
    """How plans are made."""

    planner: Annotated[
        str | None,
        typer.Option(
            help="Name of the planner; greedy is the paper's. Default: the control plane's.",
            rich_help_panel=_PLANNER,
        ),
    ] = None
    tolerance: Annotated[
        float,
        typer.Option(
            help="By how much the busiest server may exceed the mean.", rich_help_panel=_PLANNER
        ),
    ] = 0.03
    homes: Annotated[
        Homes,
        typer.Option(
            help="packed: documents in order; planned: placed so that the fewest bytes move.",
            rich_help_panel=_PLANNER,
        ),
    ] = Homes.PACKED
    byte_budget: Annotated[
        float | None,
        typer.Option(
            help="Most bytes that a rank may send in a tick, in units of what its network carries "
            "while the forward linear part of a nano-batch runs: 1.5 is a good value where CAD "
            "waits for links. Default: no limit.",
            rich_help_panel=_PLANNER,
        ),
    ] = None
    nano_batches: Annotated[
        int,
        typer.Option(help="2 with ping-pong, 1 without.", rich_help_panel=_PLANNER),
    ] = 2


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """Ranks and attention servers of an offline plan."""

    ranks: Annotated[int, typer.Option(help="Data-parallel ranks.", rich_help_panel=_CLUSTER)] = 8
    placement: Annotated[
        Placement, typer.Option(help="Where attention servers run.", rich_help_panel=_CLUSTER)
    ] = Placement.IN_PLACE
    pool_servers: Annotated[
        int,
        typer.Option(
            help="Attention servers of the pool, each with a rank's GPUs.",
            rich_help_panel=_CLUSTER,
        ),
    ] = 0
