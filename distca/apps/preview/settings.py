"""Options of previews; the fields are command-line options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from distca.apps.data.settings import Homes
from distca.contract.settings import Placement


@dataclass(frozen=True, kw_only=True)
class LengthsSettings:
    """The source of document lengths."""

    PANEL: ClassVar = "Documents"

    lengths: Annotated[
        Path | None,
        typer.Option(
            help="File with the lengths: text (one number a line), .jsonl, .parquet, .npy (lengths "
            "or document bounds) or the .idx of a Megatron-LM data set."
        ),
    ] = None
    field: Annotated[
        str | None,
        typer.Option(
            help="JSONL field or Parquet column: numbers, lists of token ids, or texts. Default: "
            "the first of the usual names."
        ),
    ] = None
    bytes_per_token: Annotated[
        float, typer.Option(help="UTF-8 bytes of a token, to estimate lengths of texts.")
    ] = 4.0
    distribution: Annotated[
        str | None,
        typer.Option(
            help="Draw lengths instead: prolong or pretrain, like the paper's two data sets."
        ),
    ] = None
    max_length: Annotated[
        int | None, typer.Option(help="Longer documents are cut. Default: tokens per rank.")
    ] = None
    shuffle: Annotated[bool, typer.Option(help="Shuffle a file.")] = True
    seed: Annotated[int, typer.Option(help="Seed for drawing and shuffling.")] = 0
    batches: Annotated[int, typer.Option(help="Steps that are planned.")] = 4


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The model's shape: a preset, of which single numbers may be changed."""

    PANEL: ClassVar = "Model"

    model: Annotated[
        str,
        typer.Option(help="llama-3-8b, llama-34b, deepseek-v2-lite, deepseek-v2 or deepseek-v3."),
    ] = "llama-3-8b"
    layers: Annotated[int | None, typer.Option(help="Decoder layers.")] = None
    hidden_size: Annotated[int | None, typer.Option(help="Width of the residual stream.")] = None
    intermediate_size: Annotated[
        int | None,
        typer.Option(help="Width of the feed-forward layer; with experts, of a token's."),
    ] = None
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads.")] = None
    head_dim: Annotated[int | None, typer.Option(help="Width of a head.")] = None
    head_dim_v: Annotated[
        int | None,
        typer.Option(help="Width of a head's values, where it is not that of its keys."),
    ] = None
    recompute: Annotated[
        bool, typer.Option(help="The backward pass runs the linear layers' forward again.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """GPUs, links and kernels."""

    PANEL: ClassVar = "Cluster"

    tokens_per_rank: Annotated[int, typer.Option(help="Tokens of a rank in a microbatch.")] = 131072
    tensor_parallel: Annotated[int, typer.Option(help="GPUs of a rank.")] = 8
    gpus_per_host: Annotated[int, typer.Option(help="GPUs of a machine.")] = 8
    bandwidth_gbps: Annotated[
        float, typer.Option(help="Network of one GPU, GB/s in each direction.")
    ] = 50.0
    host_bandwidth_gbps: Annotated[
        float, typer.Option(help="One GPU to the others of its machine, GB/s in each direction.")
    ] = 212.0
    latency_us: Annotated[float, typer.Option(help="Latency of a message, microseconds.")] = 22.0
    linear_tflops: Annotated[
        float, typer.Option(help="Achieved by one GPU in the linear layers, TFLOP/s.")
    ] = 600.0
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Cost profile of one GPU's kernels, as `distca profile` writes it. Default: an "
            "H200's."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PlannerSettings:
    """Options of planning."""

    PANEL: ClassVar = "Planner"

    planner: Annotated[
        str | None,
        typer.Option(help="Name of the planner. Default: the control plane's."),
    ] = None
    tolerance: Annotated[
        float, typer.Option(help="By how much the busiest server may exceed the mean.")
    ] = 0.03
    homes: Annotated[
        Homes,
        typer.Option(
            help="packed: documents in order; planned: placed so that the fewest bytes move."
        ),
    ] = Homes.PACKED
    byte_budget: Annotated[
        float | None,
        typer.Option(
            help="Most bytes of a rank in a tick, as a multiple of what its network carries during "
            "a nano-batch's forward linear part. Default: no limit."
        ),
    ] = None
    nano_batches: Annotated[int, typer.Option(help="2 with ping-pong, 1 without.")] = 2
    cut_documents: Annotated[
        bool,
        typer.Option(
            help="Let a document begin in the first of two nano-batches and go on in the second."
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """Ranks and attention servers of an offline plan."""

    PANEL: ClassVar = "Cluster"

    ranks: Annotated[int, typer.Option(help="Data-parallel ranks.")] = 8
    placement: Annotated[Placement, typer.Option(help="Where attention servers run.")] = (
        Placement.IN_PLACE
    )
    pool_servers: Annotated[
        int, typer.Option(help="Attention servers of the pool, each with a rank's GPUs.")
    ] = 0


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """Files of the drawings."""

    PANEL: ClassVar = "Output"

    png: Annotated[Path | None, typer.Option(help="Draw the picture of the page to this PNG.")] = (
        None
    )
    html: Annotated[Path | None, typer.Option(help="Write all of it as one HTML page.")] = None
