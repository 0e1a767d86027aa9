"""Model families of transformers: served and right, or refused with the true cause.

Servers are not needed for that: core attention is computed in their place, on the rows and the
documents that would be sent.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto import configuration_auto

import trainer_client.integrations.transformers
from core_attention.shape import AttentionShape
from core_attention.tensor_checks import check_qkv
from tests.trainer_client.tiny_models import FAMILIES, VOCABULARY, tiny_config
from trainer_client.integrations.transformers import UnsupportedModel, check_documents
from trainer_client.step.lane import Lane, current_lane

LENGTHS = [9, 1, 14]

SERVED = """
afmoe apertus apertus1p5_text arcee aria_text axk1 beam biogpt bitnet cohere cohere2 cohere2_moe
cohere_compass_text ctrl cwm deepseek_v2 deepseek_v3 diffllama dots1 emu3 ernie4_5
ernie4_5_moe exaone exaone4 exaone_moe flex_olmo fuyu gemma gemma3 gemma3_text gemma3n_text glm
glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neox granite granitemoe
granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3
iquestcoder jais2 jetmoe kolibri1 laguna llama llama4 llama4_text mellum minicpm3
minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral mllama
modernbert-decoder moshi moss_transcribe_diarize nanochat nemotron olmo olmo2 olmo3 olmoe opt
persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_moe sarvam_mla
sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 whisper youtu
"""

IGNORE_POSITIONS = """
bart blenderbot blenderbot-small marian mbart pegasus plbart
"""

MIX_NEIGHBOURS = """
jamba kimi_linear lara_mini lfm2 lfm2_moe lfm3 minimax qwen3_5_text qwen3_next zaya
"""
"""Other hybrids are like these, and take half a minute to run here."""

BY_ITSELF = """
big_bird bloom cpmant falcon git got_ocr2 gpt_neo gpt_neox_japanese megatron-bert mpt mvp
openai-gpt prophetnet reformer rembert roformer rwkv trocr xglm xlm xlnet
"""

INSTALLED = Version(transformers.__version__)
TRIED = Version("5.24.0")
"""The newest release that these lists know. A newer one may look attention up by name in more
families: those are right then, or refused."""
SERVED_SINCE = {"codegen": Version("5.24.0"), "gptj": Version("5.24.0")}
"""Before, these families computed attention by themselves."""


def known(families: Iterable[str]) -> list[str]:
    """Those that the installed release has."""
    return [family for family in families if family in configuration_auto.CONFIG_MAPPING]


SERVED_NOW = [
    *known(SERVED.split()),
    *(family for family, release in SERVED_SINCE.items() if release <= INSTALLED),
]
BY_ITSELF_NOW = [
    *BY_ITSELF.split(),
    *(family for family, release in SERVED_SINCE.items() if release > INSTALLED),
]

REFUSED = {
    "axk2": "AXK2ForCausalLM.*index_topk",
    "bert": "BertLMHeadModel.*is_causal=False",
    "bert-generation": "BertGenerationDecoder.*is_causal=False",
    "bigbird_pegasus": "BigBirdPegasusForCausalLM.*is_causal=False",
    "camembert": "CamembertForCausalLM.*is_causal=False",
    "data2vec-text": "Data2VecTextForCausalLM.*is_causal=False",
    "deepseek_v32": "DeepseekV32ForCausalLM.*index_topk",
    "deepseek_v4": "DeepseekV4ForCausalLM.*s_aux",
    "doge": "DogeForCausalLM.*attention_mask=tensor",
    "dots3_note_text": "Dots3NoteForCausalLM.*index_topk",
    "electra": "ElectraForCausalLM.*is_causal=False",
    "ernie": "ErnieForCausalLM.*is_causal=False",
    "falcon_mamba": "FalconMambaForCausalLM.*calls no attention",
    "flint": "FlintForCausalLM.*s_aux",
    "gemma2": "Gemma2ForCausalLM.*softcap",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM.*index_topk",
    "gpt_oss": "GptOssForCausalLM.*s_aux",
    "granite_swa": "GraniteSWAForCausalLM.*s_aux",
    "granitemoe_swa": "GraniteMoeSWAForCausalLM.*s_aux",
    "hy_v4": "HYV4ForCausalLM.*index_topk",
    "inkling2_loop_text": "Inkling2LoopForCausalLM.*position_bias",
    "inkling2_text": "Inkling2ForCausalLM.*position_bias",
    "inkling_text": "InklingForCausalLM.*position_bias",
    "mamba": "MambaForCausalLM.*calls no attention",
    "mamba2": "Mamba2ForCausalLM.*calls no attention",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM.*s_aux",
    "recurrent_gemma": "RecurrentGemmaForCausalLM.*calls no attention",
    "roberta": "RobertaForCausalLM.*is_causal=False",
    "roberta-prelayernorm": "RobertaPreLayerNormForCausalLM.*is_causal=False",
    "roc_bert": "RoCBertForCausalLM.*is_causal=False",
    "vaultgemma": "VaultGemmaForCausalLM.*softcap",
    "xlm-roberta": "XLMRobertaForCausalLM.*is_causal=False",
    "xlm-roberta-xl": "XLMRobertaXLForCausalLM.*is_causal=False",
    "xlstm": "xLSTMForCausalLM.*calls no attention",
    "xmod": "XmodForCausalLM.*is_causal=False",
    **dict.fromkeys(BY_ITSELF_NOW, "computes attention by itself"),
    "bloom": "BloomForCausalLM.*ALiBi",
    "mpt": "MptForCausalLM.*ALiBi",
}

NOT_RUN_HERE = """
bailing_hybrid bamba falcon_h1 gemma4 gemma4_text gemma4_unified gemma4_unified_text
granitemoehybrid hrm_text longcat_flash nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe
qwen3_5_moe_text zamba zamba2
blt dbrx dory dots3_note gemma3n gemma4_assistant gemma4_unified_assistant musicgen
musicgen_melody qwen4_exp qwen4_exp_text
"""
"""First those that take long (served, or one document a row) and Gemma 4, whose layers differ; then
those that a tiny configuration does not build or run."""


def make_model(config: PretrainedConfig, implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(
        copy.deepcopy(config), attn_implementation=implementation
    )
    model.train(False)
    return model


class PlannedStep:
    """What the integration asks of a running step: one nano-batch of LENGTHS."""

    step = 0

    def __init__(self, shape: AttentionShape, scale: float) -> None:
        self.job = SimpleNamespace(shape=shape, scale=scale, n_nano_batches=1)
        self.calls = 0

    def segments(self, nano_batch: int) -> list[tuple[int, int, int]]:
        assert nano_batch == 0
        return [(0, 0, 9), (9, 0, 1), (10, 0, 14)]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """In the place of ``core_attention``."""
        check_qkv(q, k, v, self.job.shape, sum(LENGTHS))
        self.calls += 1
        parts = (t.transpose(0, 1)[None].split(LENGTHS, dim=2) for t in (q, k, v))
        outputs = [
            nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self.job.scale, enable_gqa=True
            )
            for query, key, value in zip(*parts, strict=True)
        ]
        return torch.cat(outputs, dim=2)[0].transpose(0, 1).contiguous()


Run = Callable[[PreTrainedModel, PlannedStep], torch.Tensor]


@pytest.fixture
def run_packed(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a model on the packed documents of a step; returns its logits ``[rows, vocabulary]``."""

    def run(model: PreTrainedModel, step: PlannedStep) -> torch.Tensor:
        monkeypatch.setattr(trainer_client.integrations.transformers, "core_attention", step.attend)
        running: Any = step
        token = current_lane.set(Lane(running, 0))
        try:
            positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
            output = model(input_ids=tokens()[None], position_ids=positions, use_cache=False)
        finally:
            current_lane.reset(token)
        logits: torch.Tensor = output.logits[0]
        return logits

    return run


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(8, VOCABULARY, (sum(LENGTHS),), generator=generator)


def run_alone(model: PreTrainedModel) -> torch.Tensor:
    """The same documents, each in a row of its own, with attention of PyTorch."""
    return torch.cat(
        [
            model(
                input_ids=ids[None], position_ids=torch.arange(len(ids))[None], use_cache=False
            ).logits[0]
            for ids in tokens().split(LENGTHS)
        ]
    )


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next tokens of the same document, summed, in float64."""
    return sum(
        (
            nn.functional.cross_entropy(rows[:-1].double(), ids[1:], reduction="sum")
            for rows, ids in zip(logits.split(LENGTHS), tokens().split(LENGTHS), strict=True)
            if len(ids) > 1
        ),
        torch.zeros((), dtype=torch.float64),
    )


def planned_step(model: PreTrainedModel) -> PlannedStep:
    """A step of a session that is opened for the model."""
    check = check_documents(model)
    assert not check.fault
    (call, *others) = check.calls
    assert all(other == call for other in others)
    shape = AttentionShape(
        num_heads=call.num_heads,
        num_heads_kv=call.num_heads_kv,
        head_dim=call.head_dim,
        head_dim_v=call.head_dim_v,
        dtype="float32",
    )
    return PlannedStep(shape, call.scale)


def worst_gradient(model: nn.Module, local: nn.Module) -> tuple[float, str]:
    """Largest relative difference of a parameter's gradient, and whose. Sums that cancel are
    compared with a thousandth of the largest gradient."""
    others = {name: parameter.grad for name, parameter in local.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in others.values() if grad is not None)
    worst = (0.0, "")
    for name, parameter in model.named_parameters():
        other = others[name]
        assert (parameter.grad is None) == (other is None), name
        if parameter.grad is None or other is None:
            continue
        assert parameter.grad.dtype is parameter.dtype
        scale = max(float(other.abs().max()), 1e-3 * largest)
        worst = max(worst, (float((parameter.grad - other).abs().max()) / scale, name))
    return worst


def assert_right(family: str, run_packed: Run) -> None:
    """Loss and gradients of packed documents are those of each document alone."""
    config = tiny_config(family)
    model, local = make_model(config, "distca"), make_model(config, "eager")
    local.load_state_dict(model.state_dict())
    step = planned_step(model)
    loss, expected = loss_of(run_packed(model, step)), loss_of(run_alone(local))
    loss.backward()
    expected.backward()
    assert step.calls > 0
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    worst, name = worst_gradient(model, local)
    # float32 through two layers: some thousand roundings of 6e-8.
    assert worst < 1e-3, f"{family}: {name} differs by {worst:.1e}"


@pytest.mark.parametrize("family", SERVED_NOW)
def test_packed_documents_train_as_each_alone_does(family: str, run_packed: Run) -> None:
    assert_right(family, run_packed)


@pytest.mark.parametrize(
    ("family", "cause"),
    [(family, "ignores position_ids") for family in IGNORE_POSITIONS.split()]
    + [(family, "neighbours in the row") for family in known(MIX_NEIGHBOURS.split())],
)
def test_models_that_mix_documents_may_have_one_a_row(
    family: str, cause: str, run_packed: Run
) -> None:
    model = make_model(tiny_config(family), "distca")
    check = check_documents(model)
    assert cause in check.fault
    shape = AttentionShape(num_heads=1, num_heads_kv=1, head_dim=1, head_dim_v=1, dtype="float32")
    with pytest.raises(UnsupportedModel, match=rf"one whole document.*{cause}"):
        run_packed(model, PlannedStep(shape, 1.0))


@pytest.mark.parametrize("family", known(REFUSED))
def test_models_that_cannot_be_served_are_refused_by_name(family: str, run_packed: Run) -> None:
    if INSTALLED <= TRIED:
        with pytest.raises(UnsupportedModel, match=REFUSED[family]):
            check_documents(make_model(tiny_config(family), "distca"))
        return
    try:
        check = check_documents(make_model(tiny_config(family), "distca"))
    except UnsupportedModel:
        return
    if not check.fault:
        assert_right(family, run_packed)


@pytest.mark.parametrize(
    "family", ["cohere", "gemma3_text", "glm4", "gpt2", "granite", "mixtral", "olmo2", "phi3"]
)
def test_autocast_computes_as_with_sdpa(family: str, run_packed: Run) -> None:
    config = tiny_config(family)
    model, local = make_model(config, "distca"), make_model(config, "sdpa")
    local.load_state_dict(model.state_dict())
    step = planned_step(model)
    step.job.shape = replace(step.job.shape, dtype="bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        logits, expected = run_packed(model, step), run_alone(local)
    assert logits.dtype is expected.dtype
    loss_of(logits).backward()
    loss_of(expected).backward()
    # bfloat16 activations: roundings of 2^-9, over two layers.
    assert (logits - expected).norm() < 2e-2 * expected.norm()
    grads = {name: parameter.grad for name, parameter in local.named_parameters()}
    for name, parameter in model.named_parameters():
        grad, other = parameter.grad, grads[name]
        assert (grad is None) == (other is None), name
        if grad is not None and other is not None:
            assert grad.dtype is torch.float32
            assert (grad - other).norm() <= 5e-2 * other.norm(), name


def test_layers_of_different_shapes_are_all_told() -> None:
    calls = check_documents(make_model(tiny_config("gemma4_text"), "distca")).calls
    assert [call.head_dim for call in calls] == [16, 512]


def test_families_of_a_newer_transformers_are_right_or_refused(run_packed: Run) -> None:
    listed = {*SERVED.split(), *IGNORE_POSITIONS.split(), *MIX_NEIGHBOURS.split(), *REFUSED}
    for family in sorted(set(FAMILIES) - listed - set(NOT_RUN_HERE.split())):
        try:
            run_alone(make_model(tiny_config(family), "eager"))
        except Exception:
            continue  # it needs a configuration of its own
        try:
            check = check_documents(make_model(tiny_config(family), "distca"))
        except UnsupportedModel:
            continue
        if not check.fault:
            assert_right(family, run_packed)


def test_the_check_leaves_the_model_and_random_numbers_as_they_were() -> None:
    model = make_model(tiny_config("gpt2", attn_pdrop=0.0), "distca").train()
    nn.init.zeros_(model.get_submodule("transformer.h.0.attn.c_proj").weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    assert not check_documents(model).fault
    assert torch.equal(torch.rand(3), expected)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_fault_shows_through_weights_that_are_still_zero() -> None:
    """As with projections that begin at zero: fresh position embeddings may be zero as well."""
    model = make_model(tiny_config("bart"), "distca")
    for name, parameter in model.named_parameters():
        if "embed_positions" in name or "out_proj" in name:
            nn.init.zeros_(parameter)
    assert "ignores position_ids" in check_documents(model).fault


def test_attention_dropout_is_refused_before_the_first_step() -> None:
    model = make_model(tiny_config("llama", attention_dropout=0.1), "distca").train()
    with pytest.raises(UnsupportedModel, match=r"does not support dropout=0\.1"):
        check_documents(model)
    check_documents(model.eval())


def test_a_compiled_model_is_checked_without_compiling() -> None:
    model = make_model(tiny_config("llama"), "distca")
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    for layer in model.get_submodule("model.layers").children():
        layer.compile(backend=backend)
    check_documents(model)
    assert not graphs


def test_copies_of_a_model_are_checked_by_themselves(run_packed: Run) -> None:
    model = make_model(tiny_config("llama"), "distca")
    step = planned_step(model)
    expected = run_packed(model, step)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run_packed(other, step), expected)
