"""What Megatron-core is refused for when a layer is built, or its documents are others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import greenlet
import pytest
import torch

from tests.cluster.frameworks.cpu_devices import megatron_on_cpu

megatron_on_cpu()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.extensions.transformer_engine import TEDotProductAttention  # noqa: E402
from megatron.core.models.common.embeddings.rotary_pos_embedding import (  # noqa: E402
    RotaryEmbedding,
)
from megatron.core.models.common.language_module.language_module import (  # noqa: E402
    LanguageModule,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.ssm.mamba_block import MambaStack  # noqa: E402
from megatron.core.tensor_parallel import random as megatron_random  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.experimental_attention_variant.dsa import (  # noqa: E402
    DSAttention,
)
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402

from core_attention.errors import ManifestError  # noqa: E402
from examples.megatron.train_gpt import Parallelism, Shape, transformer_config  # noqa: E402
from tests.support.errors import refused  # noqa: E402
from tests.support.reference import packed_attention  # noqa: E402
from trainer_client.errors import SessionError  # noqa: E402
from trainer_client.frameworks.megatron import (  # noqa: E402
    ServedCoreAttention,
    ServedSteps,
    host_bounds,
    inside_documents,
    rng_fork,
    serve,
)
from trainer_client.frameworks.megatron.attention import check_packed  # noqa: E402
from trainer_client.frameworks.megatron.halves import (  # noqa: E402
    Half,
    Layout,
    halves_of,
    packed_of,
)
from trainer_client.frameworks.megatron.inside_documents import (  # noqa: E402
    why_documents_stay_whole,
)
from trainer_client.frameworks.megatron.lanes import HalvesInTurns  # noqa: E402
from trainer_client.frameworks.megatron.refusals import has_experts_apart  # noqa: E402
from trainer_client.frameworks.megatron.steps import (  # noqa: E402
    _bounds,
    _check_equal,
    _check_layers,
    _cuts_documents,
    _takes_turns,
)
from trainer_client.frameworks.versions import UnsupportedSetting  # noqa: E402
from trainer_client.models.documents import Documents  # noqa: E402


def packed_rows(lengths: list[int]) -> PackedSeqParams:
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def layer(mask: AttnMaskType = AttnMaskType.causal, kind: str = "self", **changes: Any) -> Any:
    config = transformer_config(Shape(), Parallelism())
    for name, value in changes.items():
        setattr(config, name, value)
    group = SimpleNamespace(tp=SimpleNamespace(size=lambda: 2))
    return ServedCoreAttention(config, 1, mask, kind, pg_collection=group)


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        {"recompute_granularity": "full"},
        {"qk_clip": True},
        {"hybrid_context_parallel": True},
        {"context_parallel_size": 2},
        {"cuda_graph_impl": "local"},
        {"softmax_type": "learnable"},
        {"window_size": (8, 0)},
        {"attention_dropout": 0.1},
        {"mask": AttnMaskType.no_mask},
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedSetting):
        layer(**changes)


def test_a_layer_has_the_heads_of_its_rank() -> None:
    shape = layer().shape
    assert (shape.num_heads, shape.num_heads_kv, shape.head_dim) == (2, 1, 16)


def test_the_spec_is_copied_and_a_model_without_the_hook_refused() -> None:
    spec = get_gpt_layer_local_spec()
    before = spec.submodules.self_attention.submodules.core_attention
    made = serve(spec)
    assert made.submodules.self_attention.submodules.core_attention is ServedCoreAttention
    assert spec.submodules.self_attention.submodules.core_attention is before
    with pytest.raises(UnsupportedSetting):
        serve(ModuleSpec(module=IdentityOp))


def core_attention_of(layer_spec: Any) -> Any:
    return layer_spec.submodules.self_attention.submodules.core_attention


def test_hybrid_stacks_of_megatron_itself_are_served() -> None:
    """Their layers need TransformerEngine and mamba-ssm when they are built."""
    served = serve(mamba_stack_spec).submodules
    assert core_attention_of(served.attention_layer) is ServedCoreAttention
    assert core_attention_of(mamba_stack_spec.submodules.attention_layer) is TEDotProductAttention
    assert served.mamba_layer == mamba_stack_spec.submodules.mamba_layer
    assert served.moe_layer == mamba_stack_spec.submodules.moe_layer


def test_core_attention_of_another_kind_stays_and_alone_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    full, sparse = get_gpt_layer_local_spec(), get_gpt_layer_local_spec()
    full.submodules.self_attention.submodules.core_attention = ModuleSpec(
        module=DotProductAttention, params={"attention_dropout": 0.0}
    )
    sparse.submodules.self_attention.submodules.core_attention = ModuleSpec(module=DSAttention)
    block = TransformerBlockSubmodules(layer_specs=[sparse, full])
    with caplog.at_level("INFO"):
        first, second = serve(block).layer_specs
    assert core_attention_of(first).module is DSAttention
    assert core_attention_of(second).module is ServedCoreAttention
    assert core_attention_of(second).params == {"attention_dropout": 0.0}
    assert caplog.records
    with pytest.raises(UnsupportedSetting):
        serve(sparse)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"qkv_format": "sbhd"}, UnsupportedSetting),
        ({"cu_seqlens_q_padded": torch.tensor([0, 4, 8])}, UnsupportedSetting),
        ({"local_cp_size": 2}, UnsupportedSetting),
        ({"cu_seqlens_q": torch.tensor([0, 4, 5])}, ValueError),
    ],
)
def test_documents_must_be_those_of_the_manifest(
    changes: dict[str, Any], error: type[Exception]
) -> None:
    bounds = torch.tensor([0, 3, 5])
    given = {"qkv_format": "thd", "cu_seqlens_q": bounds, "cu_seqlens_kv": bounds}
    documents = Documents("step 0", [(0, 0, 3), (3, 0, 2)])
    check_packed(PackedSeqParams(**given), documents)
    with pytest.raises(error):
        check_packed(PackedSeqParams(**{**given, **changes}), documents)


@pytest.mark.parametrize("lengths", [[1, 7, 1, 3], [12]])
def test_validation_outside_of_a_step_is_computed_at_home(lengths: list[int]) -> None:
    served = layer()
    shape, rows = served.shape, sum(lengths)
    heads = (shape.num_heads, shape.num_heads_kv, shape.num_heads_kv)
    q, k, v = (torch.randn(rows, n, shape.head_dim) for n in heads)
    packed = packed_rows(lengths)
    with pytest.raises(SessionError):
        served(q, k, v, packed_seq_params=packed)
    right, _ = packed_attention(q, k, v, lengths)
    with torch.no_grad():
        o = served(q, k, v, packed_seq_params=packed)
        # Two documents of half the rows, not packed: [s, b, heads, head_dim].
        halves = [t.view(2, rows // 2, *t.shape[1:]).transpose(0, 1) for t in (q, k, v)]
        unpacked = served(*halves)
    # A float32 sum of at most 12 terms.
    torch.testing.assert_close(o.double(), right, rtol=1e-5, atol=1e-6)
    right, _ = packed_attention(q, k, v, [rows // 2] * 2)
    found = unpacked.transpose(0, 1).reshape(right.shape).double()
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layers", [1, 0])
def test_ranks_with_unequal_layers_are_refused(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those without a pipeline whose order is known. One without any layer comes to the exchange,
    too, in which others await it."""

    def gather(counts: list[Any], own: int) -> None:
        counts[:] = [own, own + 1]

    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    with pytest.raises(UnsupportedSetting):
        _check_equal(_check_layers([layer() for _ in range(layers)]))


def test_what_says_too_little_is_refused() -> None:
    q = torch.zeros(4, 2, 16)
    with pytest.raises(SessionError):
        layer()(q, q[:, :1], q[:, :1], None)
    with pytest.raises(UnsupportedSetting):
        layer(kind="cross")
    with pytest.raises(ManifestError):
        _bounds(7, {"tokens": torch.zeros(4)})
    with pytest.raises(SessionError):
        _check_layers([])


@pytest.mark.parametrize(
    ("lengths", "multiple", "inside", "expected"),
    [
        # Lengths in both halves, those of padding too, and their longest documents up to there.
        ([3, 5, 4], 1, False, [([3, 5], 5), ([4], 4)]),
        ([3, 2, 7], 4, False, [([3, 2, 3], 3), ([7, 1], 7)]),
        ([12], 2, False, [([12], 12), ([2], 2)]),
        ([3, 5, 4], 1, True, [([3, 3], 3), ([2, 4], 5)]),
        ([3, 3, 6], 1, True, [([3, 3], 3), ([6], 6)]),
        ([10, 3], 4, True, [([8], 8), ([2, 3, 3], 10)]),
        ([3], 4, True, [([3, 1], 3), ([4], 4)]),
    ],
)
def test_packed_parameters_of_halves(
    lengths: list[int], multiple: int, inside: bool, expected: list[tuple[list[int], int]]
) -> None:
    packed = packed_rows(lengths)
    bounds = packed.cu_seqlens_q
    halves = halves_of(
        bounds.tolist(), multiple=multiple, may_be_empty=False, inside_documents=inside
    )
    for half, (own_lengths, longest) in zip(halves, expected, strict=True):
        own = packed_of(packed, half)
        assert own.cu_seqlens_q.diff().tolist() == own_lengths
        assert own.cu_seqlens_kv is own.cu_seqlens_q
        # Of tables of rotary embeddings.
        assert own.max_seqlen_q == longest
    assert packed.cu_seqlens_q is bounds


def test_what_newer_versions_tell_of_documents_is_cut_too() -> None:
    index = torch.tensor([[0, 0, 0, 1, 1, 2, 2]], dtype=torch.int32)
    packed = SimpleNamespace(
        cu_seqlens_q=torch.tensor([0, 3, 5, 7]), total_tokens=7, seq_idx=index, tokens_per_sample=7
    )
    own = packed_of(packed, Half(3, 7, padding=2, first=1, last=3))
    assert (own.total_tokens, own.tokens_per_sample) == (6, None)
    assert own.seq_idx.tolist() == [[0, 0, 1, 1, 2, 2]]
    assert packed.total_tokens == 7
    with pytest.raises(UnsupportedSetting):
        packed_of(SimpleNamespace(of_tomorrow=1), Half(0, 3, first=0, last=1))


class Language(LanguageModule):
    """Has what lanes see of a model of Megatron-core."""

    def __init__(self, **changes: Any) -> None:
        torch.nn.Module.__init__(self)
        self.config = transformer_config(Shape(experts=changes.pop("experts", None)), Parallelism())
        for name, value in changes.items():
            setattr(self.config, name, value)
        self.pre_process = True

    def set_input_tensor(self, _: Any) -> None: ...

    def forward(self, input_ids: Any, attention_mask: Any = None, **named: Any) -> Any:
        raise AssertionError("it is refused before it is run")


APART = {"experts": 4, "expert_model_parallel_size": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {"fp8": "hybrid"},
        {"tp_comm_overlap": True},
        {"mtp_num_layers": 1},
        {"experts": 4, "moe_aux_loss_coeff": 0.01, "calculate_per_token_loss": False},
        {"moe_aux_loss_coeff": [0.01], "moe_router_load_balancing_type": ["global_aux_loss"]}
        | {"experts": 4},
        APART | {"moe_token_dispatcher_type": "allgather"},
        {"experts": 4, "expert_tensor_parallel_size": 2, "moe_token_dispatcher_type": "allgather"},
        APART | {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
        APART | {"moe_token_dispatcher_type": "alltoall", "moe_pad_expert_input_to_capacity": True},
    ],
)
def test_halves_take_turns_where_they_can(
    changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = Language(**changes)
    with pytest.raises(UnsupportedSetting):
        _takes_turns([model], True, 1)
    assert not _takes_turns([model], False, 1)
    assert not caplog.records
    assert not _takes_turns([model], None, 1)
    assert caplog.records
    assert _takes_turns([Language()], None, 1)
    assert _takes_turns([Language(experts=4, moe_aux_loss_coeff=0.01)], True, 1)


def test_other_models_and_more_microbatches_than_can_be_cut_do_not_take_turns() -> None:
    assert _takes_turns([Language()], None, 128)
    for model, n_microbatches in ((Language(), 129), (torch.nn.Linear(1, 1), 1)):
        assert not _takes_turns([model], None, n_microbatches)
        with pytest.raises(UnsupportedSetting):
            _takes_turns([model], True, n_microbatches)


def test_experts_of_other_documents_are_awaited_in_both_halves() -> None:
    for changes, is_apart in (
        ({}, False),
        ({"expert_model_parallel_size": 2}, True),
        ({"expert_tensor_parallel_size": 2}, True),
        ({"expert_tensor_parallel_size": 2, "tensor_model_parallel_size": 2}, False),
    ):
        model = Language(experts=4, **changes)
        assert has_experts_apart(model.config) is is_apart
        halves = HalvesInTurns(model, inside_documents=False).cut([0, 12], inside_documents=False)
        assert (halves[1].padding > 0) is is_apart


def test_padding_of_hidden_states_is_shared_like_their_rows() -> None:
    half = Half(96, 96, padding=2, first=1, last=1)
    hidden, mask = torch.ones(48, 1, 8), torch.zeros(1, 96, dtype=torch.bool)
    assert Layout(packed=False, shards=2).of_hidden(hidden, half).shape == (1, 1, 8)
    assert Layout(packed=False).of_tokens(mask, half, fill=1).tolist() == [[True, True]]
    half = Half(0, 3, padding=1, first=0, last=1)
    its = Layout(packed=True).of_tokens(mask, half, fill=1)
    assert its.tolist() == [[False, False, False, True]]


class Plans:
    """A session whose plans are not ready at first."""

    def __init__(self, n_nano_batches: int) -> None:
        self.options = SimpleNamespace(n_nano_batches=n_nano_batches, rank=0)
        self.submitted: list[Any] = []

    @property
    def next_step(self) -> int:
        return len(self.submitted)

    def submit(self, manifest: Any, *, forward_only: bool) -> None:
        self.submitted.append(manifest)

    @contextmanager
    def step(self, number: int) -> Iterator[int]:
        yield number


def test_a_step_of_other_microbatches_is_refused() -> None:
    plans: Any = Plans(4)
    steps = ServedSteps(plans, [Language()])
    microbatch = {"cu_seqlens": torch.tensor([0, 5, 12])}
    with steps.step([microbatch] * 2):
        assert [half.n_rows for half in steps._running[0].halves] == [5, 7]
    with refused(), steps.step([microbatch]):
        pass
    assert [manifest.n_nano_batches for manifest in plans.submitted] == [4]


def test_halves_leave_the_fork_of_random_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a transformer block with sequence parallelism runs them; of Megatron's own tracker."""
    device = torch.Generator().manual_seed(5)
    monkeypatch.setattr(megatron_random, "_get_cuda_rng_state", lambda **_: device.get_state())
    monkeypatch.setattr(
        megatron_random, "_set_cuda_rng_state", lambda state, **_: device.set_state(state)
    )
    tracker = megatron_random.CudaRNGStatesTracker()
    tracker.states_["model-parallel-rng"] = torch.Generator().manual_seed(77).get_state()
    monkeypatch.setattr(megatron_random, "get_cuda_rng_tracker", lambda: tracker)
    drawn: list[list[float]] = [[], []]
    own = [torch.Generator().manual_seed(lane).get_state() for lane in range(2)]

    def block(lane: int) -> None:
        with tracker.fork():
            for _ in range(3):
                drawn[lane].append(float(torch.rand((), generator=device)))
                with rng_fork.outside_fork():
                    own[lane] = device.get_state()
                    greenlet.getcurrent().parent.switch()
                    device.set_state(own[lane])
                drawn[lane].append(float(torch.rand((), generator=device)))

    lanes = [greenlet.greenlet(block) for _ in range(2)]
    for _ in range(4):
        for lane, each in enumerate(lanes):
            if not each.dead:
                each.switch(lane)
    expected = torch.Generator().manual_seed(77)
    stream = [float(torch.rand((), generator=expected)) for _ in range(12)]
    assert sorted(drawn[0] + drawn[1]) == sorted(stream)
    assert tracker._current_state_name == "default-rng"


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"input_ids": torch.zeros(1, 8)}, ValueError),
        ({"input_ids": torch.zeros(1, 12), "packed_seq_params": None}, ValueError),
        ({"input_ids": torch.zeros(1, 12), "images": torch.zeros(1, 12)}, UnsupportedSetting),
    ],
)
def test_what_cannot_be_cut_is_refused(given: dict[str, Any], error: type[Exception]) -> None:
    model = Language()
    turns = HalvesInTurns(model, inside_documents=False)
    packed = packed_rows([5, 7])
    halves = turns.cut([0, 5, 12], inside_documents=False)
    with turns.running(halves, first=0), pytest.raises(error):
        model.forward(**{"packed_seq_params": packed, **given})
    # Nor is a document that does not lie in a packed row.
    turns = HalvesInTurns(model, inside_documents=True)
    halves = turns.cut([0, 12], inside_documents=True)
    with turns.running(halves, first=0), pytest.raises(UnsupportedSetting):
        model.forward(torch.zeros(1, 12))


def test_a_model_is_left_as_it_was() -> None:
    model = Language()
    model.rotates = RotaryEmbedding(16, 1.0, use_cpu_initialization=True)
    for _ in range(2):
        before = model.forward
        turns = HalvesInTurns(model, inside_documents=True)
        assert model.forward != before
        assert model.rotates._forward_hooks
        turns.undo()
        assert model.forward == before
        assert not model.rotates._forward_hooks


@pytest.mark.parametrize(
    ("given", "asked", "inside"),
    [
        ({"packed_seq_params": True}, None, True),
        ({"packed_seq_params": True}, False, False),
        # Each document may have a row of its own.
        ({"packed_seq_params": None}, None, False),
        ({}, None, False),
        ({}, True, True),
    ],
)
def test_only_packed_rows_are_cut_inside_documents(
    given: dict[str, Any], asked: bool | None, inside: bool
) -> None:
    plans: Any = Plans(2)
    steps = ServedSteps(plans, [Language()], cut_documents=asked)
    batch = {name: value and packed_rows([9, 3]) for name, value in given.items()}
    with steps.step([{"cu_seqlens": torch.tensor([0, 9, 12]), **batch}]):
        pass
    (manifest,) = plans.submitted
    rows = [manifest.tokens(lane) for lane in range(2)]
    assert rows == ([6, 6] if inside else [9, 3])


ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
"""A group of context parallelism."""


def model_of(core: Any, *others: Any, rotates: str = "rope", **changes: Any) -> Any:
    made: Any = Language(**changes)
    made.layer = torch.nn.ModuleList([torch.nn.Module(), *others])
    made.layer[0].core_attention = core
    made.position_embedding_type = rotates
    return made


def mamba_stack() -> Any:
    stack = MambaStack.__new__(MambaStack)
    torch.nn.Module.__init__(stack)
    return stack


def test_models_in_which_more_than_attention_sees_neighbours_are_cut_at_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda **_: ALONE)

    def why(*modules: Any, **changes: Any) -> list[str]:
        return [*why_documents_stay_whole([model_of(*modules, **changes)])]

    served = layer()
    assert not why(served)
    assert not why(served, rotates="none")
    assert not why(served, multi_latent_attention=True)
    assert why(torch.nn.Identity())
    assert why(served, apply_rope_fusion=True)
    assert why(served, mtp_num_layers=1)
    assert why(served, rotates="mrope")
    assert why(served, mamba_stack())
    assert why(served, torch.nn.Conv1d(1, 1, 1))
    assert [*why_documents_stay_whole([torch.nn.Linear(1, 1)])]
    # A version that reads every document from 0 on.
    monkeypatch.setattr(
        inside_documents,
        "apply_rotary_pos_emb",
        lambda rows, table, config, cu_seqlens=None, cp_group=None: (
            rows + table[: len(rows)].roll(1, 0) if cu_seqlens is None else rows
        ),
    )
    assert why(served)


def test_cut_documents_that_a_model_cannot_run_are_refused_if_asked_for() -> None:
    models = [torch.nn.Linear(1, 1)]
    assert _cuts_documents(models, None, takes_turns=True) is False
    assert _cuts_documents(models, None, takes_turns=False) is False
    with pytest.raises(UnsupportedSetting):
        _cuts_documents(models, True, takes_turns=True)
    with pytest.raises(UnsupportedSetting):
        _cuts_documents(models, True, takes_turns=False)


def test_bounds_of_documents_are_found_on_the_host() -> None:
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, cu_seqlens_q_padded=bounds
    )
    later: list[Any] = []
    own = host_bounds.with_planned_bounds(packed, [0, 5, 12], "step 3 microbatch 1", later.append)
    assert own is not packed
    assert own.cu_seqlens_q is own.cu_seqlens_kv is own.cu_seqlens_q_padded is not bounds
    assert torch.equal(own.cu_seqlens_q, bounds)
    assert own.cu_seqlens_kv_padded is None
    assert packed.cu_seqlens_q is bounds
    (compare_the_rest,) = later
    compare_the_rest()
    with refused():
        host_bounds.with_planned_bounds(packed, [0, 4, 12], "step 3 microbatch 1", later.append)
    packed.cu_seqlens_kv = torch.tensor([0, 4, 12])
    with refused():
        host_bounds.with_planned_bounds(packed, [0, 5, 12], "step 3 microbatch 1", later.append)


def test_bounds_stay_on_the_gpu_where_they_are_needed() -> None:
    served = layer()
    assert host_bounds.are_read_on_host(model_of(served))
    for model in (
        model_of(torch.nn.Identity()),
        model_of(served, apply_rope_fusion=True),
        model_of(served, rotates="none"),
        model_of(served, mamba_stack()),
        torch.nn.Linear(1, 1),
    ):
        assert not host_bounds.are_read_on_host(model)
