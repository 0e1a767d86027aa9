"""The shape of a model's core attention: heads, head dims, dtype, mask, softcap."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from core_attention.ca_task import MaskKind
from core_attention.score_rule import ScoreRule, check_softcap

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Tensor dtypes that may travel, by their torch names, and their bytes per element."""

LSE_BYTES = 4
"""Log-sum-exp and row sums are float32 whatever the dtype of the tensors."""


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Heads, head dims and dtype of Q, K, V and O, and what the scores go through; the same for
    every layer of a job.

    Attributes:
        num_heads: query heads.
        num_heads_kv: key and value heads; divides ``num_heads`` (GQA; 1 is MQA).
        head_dim: of Q and K.
        head_dim_v: of V and O; usually ``head_dim``, different with MLA.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        softcap: c of c * tanh(score / c), which takes the place of each scaled score; 0 is none.
        mask: which keys of its document a query sees.
    """

    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    softcap: float = 0.0
    mask: MaskKind = MaskKind.CAUSAL

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_heads_kv", "head_dim", "head_dim_v"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be an integer of 1 or more")
        if self.num_heads % self.num_heads_kv:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_heads_kv {self.num_heads_kv}"
            )
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype is {self.dtype!r}; valid are {sorted(DTYPE_BYTES)}")
        object.__setattr__(self, "mask", MaskKind(self.mask))
        check_softcap(self.softcap)

    @property
    def rule(self) -> ScoreRule:
        """The kernels' rule for the scores."""
        return ScoreRule(mask=self.mask, softcap=self.softcap)

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_heads_kv

    @property
    def default_softmax_scale(self) -> float:
        """The factor of q.k before the softmax unless a model says otherwise."""
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def q_row_bytes(self) -> int:
        """Bytes of one row of Q (and of dQ)."""
        return self.num_heads * self.head_dim * self.itemsize

    @property
    def o_row_bytes(self) -> int:
        """Bytes of one row of O (and of dO)."""
        return self.num_heads * self.head_dim_v * self.itemsize

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of one row of K and V together (and of dK and dV)."""
        return self.num_heads_kv * (self.head_dim + self.head_dim_v) * self.itemsize

    @property
    def lse_row_bytes(self) -> int:
        """Bytes of one row of log-sum-exp (and of the row sums of dO * O)."""
        return self.num_heads * LSE_BYTES

    def share(self, n_ranks: int) -> AttentionShape:
        """The heads of one of ``n_ranks`` tensor-parallel ranks."""
        for name in ("num_heads", "num_heads_kv"):
            if getattr(self, name) % n_ranks:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be a multiple of the {n_ranks} "
                    "tensor-parallel ranks"
                )
        return replace(
            self, num_heads=self.num_heads // n_ranks, num_heads_kv=self.num_heads_kv // n_ranks
        )

    def qk_flops(self, qk_pairs: int, backward: bool = False) -> int:
        """Floating-point operations of ``qk_pairs`` query-key pairs over all heads.

        Two matrix products forward and five backward, two operations a multiply-add, as FA counts.
        """
        per_pair = 2 * self.num_heads * (self.head_dim + self.head_dim_v)
        return int(qk_pairs * per_pair * (2.5 if backward else 1))


def parse_shape(text: str) -> AttentionShape:
    """Reads ``HEADS:KV_HEADS:HEAD_DIM:DTYPE``, for example ``32:8:128:bfloat16``. Where values have
    another head dim than queries and keys, both are given: ``128:128:192/128:bfloat16``. A softcap
    comes last: ``8:4:256:bfloat16:50``.
    """
    parts = text.split(":")
    dims = parts[2].split("/") if len(parts) in (4, 5) else []
    softcap = parts[4] if len(parts) == 5 else "0"
    numbers = (*parts[:2], *dims, softcap.replace(".", "", 1))
    if not 1 <= len(dims) <= 2 or not all(number.isdecimal() for number in numbers):
        raise ValueError(
            f"shape is {text!r}; write HEADS:KV_HEADS:HEAD_DIM[/HEAD_DIM_V]:DTYPE[:SOFTCAP], for "
            "example 32:8:128:bfloat16, 32:32:192/128:bfloat16 or 8:4:256:bfloat16:50"
        )
    try:
        return AttentionShape(
            num_heads=int(parts[0]),
            num_heads_kv=int(parts[1]),
            head_dim=int(dims[0]),
            head_dim_v=int(dims[-1]),
            dtype=parts[3],
            softcap=float(softcap),
        )
    except ValueError as error:
        raise ValueError(f"shape is {text!r}: {error}") from error


def format_shape(shape: AttentionShape) -> str:
    """Writes what :func:`parse_shape` reads."""
    dims = f"{shape.head_dim}"
    if shape.head_dim_v != shape.head_dim:
        dims += f"/{shape.head_dim_v}"
    softcap = f":{shape.softcap:.12g}" if shape.softcap else ""
    return f"{shape.num_heads}:{shape.num_heads_kv}:{dims}:{shape.dtype}{softcap}"
