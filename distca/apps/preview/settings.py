"""Options of previews; the fields are command-line options."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from distca.contract.settings import Placement
from distca.options import option


class Homes(StrEnum):
    """Ways to choose the rank that holds a token."""

    PACKED = "packed"
    PLANNED = "planned"


@dataclass(frozen=True, kw_only=True)
class LengthsSettings:
    """The source of document lengths."""

    PANEL: ClassVar = "Documents"

    lengths: Path | None = option(
        None,
        "File with the lengths: text (one number a line), .jsonl, .parquet, .npy (lengths or "
        "document bounds) or the .idx of a Megatron-LM data set.",
    )
    field: str | None = option(
        None,
        "JSONL field or Parquet column: numbers, lists of token ids, or texts. Default: the "
        "first of the usual names.",
    )
    bytes_per_token: float = option(4.0, "UTF-8 bytes of a token, to estimate lengths of texts.")
    distribution: str | None = option(
        None, "Draw lengths instead: prolong or pretrain, like the paper's two data sets."
    )
    max_length: int | None = option(None, "Longer documents are cut. Default: tokens per rank.")
    shuffle: bool = option(True, "Shuffle a file.")
    seed: int = option(0, "Seed for drawing and shuffling.")
    batches: int = option(4, "Steps that are planned.")


@dataclass(frozen=True, kw_only=True)
class GroupsSettings:
    """Samples that share prompts, instead of documents."""

    PANEL: ClassVar = "Documents"

    groups: Path | None = option(
        None,
        'What trees save: a file with one group a line, {"prompt": 32768, "completions": [8192, '
        "8192]}; a completion may be a group.",
    )


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The model's shape: a preset, of which single numbers may be changed."""

    PANEL: ClassVar = "Model"

    model: str = option(
        "llama-3-8b", "llama-3-8b, llama-34b, deepseek-v2-lite, deepseek-v2 or deepseek-v3."
    )
    n_layers: int | None = option(None, "Decoder layers.", "--layers")
    hidden_size: int | None = option(None, "Width of the residual stream.")
    intermediate_size: int | None = option(
        None, "Width of the feed-forward layer; with experts, of a token's."
    )
    num_heads: int | None = option(None, "Query heads.", "--heads")
    num_heads_kv: int | None = option(None, "Key/value heads.", "--kv-heads")
    head_dim: int | None = option(None, "Width of a head.")
    head_dim_v: int | None = option(
        None, "Width of a head's values, where it is not that of its keys."
    )
    recompute: bool = option(False, "The backward pass runs the linear layers' forward again.")


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """GPUs, links and kernels."""

    PANEL: ClassVar = "Cluster"

    tokens_per_rank: int = option(131072, "Tokens of a rank in a microbatch.")
    tensor_parallel: int = option(8, "GPUs of a rank.")
    gpus_per_host: int = option(8, "GPUs of a machine.")
    bandwidth_gbps: float = option(50.0, "Network of one GPU, GB/s in each direction.")
    host_bandwidth_gbps: float = option(
        212.0, "One GPU to the others of its machine, GB/s in each direction."
    )
    latency_us: float = option(22.0, "Latency of a message, microseconds.")
    linear_tflops: float = option(600.0, "Achieved by one GPU in the linear layers, TFLOP/s.")
    profile: Path | None = option(
        None,
        "Cost profile of one GPU's kernels, as `distca profile` writes it. Default: an H200's.",
    )


@dataclass(frozen=True, kw_only=True)
class PlannerSettings:
    """Options of planning."""

    PANEL: ClassVar = "Planner"

    planner: str | None = option(None, "Name of the planner. Default: the control plane's.")
    tolerance: float = option(0.03, "By how much the busiest server may exceed the mean.")
    homes: Homes = option(
        Homes.PACKED, "packed: documents in order; planned: placed so that the fewest bytes move."
    )
    nano_batches: int = option(2, "2 with ping-pong, 1 without.")


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """Ranks and attention servers of an offline plan."""

    PANEL: ClassVar = "Cluster"

    ranks: int = option(8, "Data-parallel ranks.")
    placement: Placement = option(Placement.IN_PLACE, "Where attention servers run.")
    pool_servers: int = option(0, "Attention servers of the pool, each with a rank's GPUs.")


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """Files of the drawings."""

    PANEL: ClassVar = "Output"

    png: Path | None = option(None, "Draw the picture of the page to this PNG.")
    html: Path | None = option(None, "Write all of it as one HTML page.")
