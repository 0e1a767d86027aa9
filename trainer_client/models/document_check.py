"""A check that a transformers model keeps packed documents apart, by running it.

Core attention follows the manifest, whatever the model does around it. A model is right only if the
rest does so too: position embeddings must follow ``position_ids``, and nothing else (convolutions,
recurrent states, attention of the model's own) may reach from one document into the next. No
argument that reaches attention proves that, so the model runs a few tokens, with attention computed
here: a document's outputs must not depend on its neighbours, nor on its place in the row.

Every model of transformers whose attention is ``"distca"`` is checked before its first forward in a
step, by a hook that it gets when it is built; :func:`check_documents` does so at any other time.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PretrainedConfig, PreTrainedModel

from core_attention.ca_task import MaskKind
from core_attention.host_copies import on_host
from core_attention.kernels.own import shape_of
from core_attention.manifest import NO_PARENT
from core_attention.shape import AttentionShape
from trainer_client.hooks.checkpointing import Checkpoints
from trainer_client.hooks.compile_boundary import outside_graphs, uncompiled
from trainer_client.hooks.kept_state import untouched
from trainer_client.hooks.pipelining_dry_run import is_shape_inference
from trainer_client.hooks.sharded_weights import gathered_as_before, needs_other_ranks
from trainer_client.hooks.tensor_parallel import n_shares
from trainer_client.local_attention.at_home import HomeMask, is_at_home
from trainer_client.local_attention.plain import attend_documents
from trainer_client.models.documents import CHECKED, Documents, documents_of
from trainer_client.models.entrance import entrances, open_door
from trainer_client.step.home_tasks import FULL, LayerKind
from trainer_client.step.lane import current_lane, current_step, require_lane
from trainer_client.turns.branches import Branches

IMPLEMENTATION = "distca"

REPLACED = os.environ.get("DISTCA_REPLACES", "")
"""An implementation that is served under its own name; empty: none is."""

LENGTHS = (5, 4, 5)
"""Lengths of the check's documents, for each tensor-parallel rank: sequence parallelism gives all
of them equally many rows. The first and the last change places: the same rows are computed then, in
another order, and hardly even rounding differs."""

TRIES = 3
"""Rounding may send a token to another expert, which changes its outputs as a fault does; but a
fault shows with whatever tokens."""

_SPECIAL_TOKENS = 8
"""The first tokens of vocabularies are special to many models: padding, for example."""

_TOLERANCES = {
    # Some hundred roundings of 2^-24; what convolutions of new weights leak is ten times as much.
    torch.float64: 3e-5,
    torch.float32: 3e-5,
    # A quarter of one rounding of the largest output, 2^-8 and 2^-11. Nothing is rounded otherwise
    # when documents change places, but where a device sums in any order it likes.
    torch.bfloat16: 1e-3,
    torch.float16: 1.2e-4,
}
"""Largest difference of outputs, relative to the largest output, that shows no fault. A device that
computes the same twice and differs by more has twice that difference instead."""


_MIXES = (
    "its neighbours in the row: the model mixes tokens elsewhere than in the attention that is "
    "served (recurrent or convolutional layers, attention of its own)"
)
_COUNTS_THE_ROW = (
    "what its neighbours hold, such as masked tokens that are counted over the whole row (ESM's "
    "token_dropout; token_dropout=False in the model's config turns it off)"
)
_COUNTS_POSITIONS = (
    "its place in the row: the model counts positions by itself and ignores position_ids"
)


class UnsupportedModel(ValueError):
    """The model cannot be served: its outputs would be wrong, it asks for attention that is not
    supported, by the arguments that are named, or it never calls core attention."""


@dataclass(frozen=True)
class ModelCall:
    """A call of core attention in one forward.

    Attributes:
        shape: of its tensors.
        scale: what multiplies q.k before the softmax.
        kind: which keys its queries see.
    """

    shape: AttentionShape
    scale: float
    kind: LayerKind = FULL


@dataclass(frozen=True)
class DocumentCheck:
    """Findings about a model.

    Attributes:
        calls: of core attention in one forward, in order.
        needs: arguments that must come with every batch.
        fault: why the model can take rows of one whole document only; empty if it takes packed
            documents.
        counts_from_zero: whether a document's tokens have positions from 0 up where the model is
            given none; those of RoBERTa begin behind the padding token's id.
        branch_fault: why it takes no documents that share prefixes; empty if it does.
    """

    calls: tuple[ModelCall, ...]
    needs: frozenset[str]
    fault: str
    counts_from_zero: bool = True
    branch_fault: str = ""

    def served_calls(self, *, windows: bool = False) -> tuple[ModelCall, ...]:
        """The calls that servers compute: full ones, and those with ``windows``, also if the model
        has no full ones. The others are computed at home."""
        windows = windows or not any(call.kind.is_full for call in self.calls)
        return tuple(c for c in self.calls if c.kind.is_full or (windows and c.kind.window))


@dataclass(frozen=True, eq=False)
class LayerCall:
    """Demands of a layer on attention, besides the rows.

    Attributes:
        kind: which keys its queries see.
        softcap: of the scores; 0 is none.
        scaling: multiplies q.k; None is 1 / sqrt(head_dim).
        sinks: ``[num_heads]``, or None.
        mask: causal or full.
    """

    kind: LayerKind
    softcap: float
    scaling: float | None
    sinks: torch.Tensor | None
    mask: MaskKind


@dataclass
class Check:
    """A forward of a check; computes attention in the place of servers.

    Attributes:
        documents: of its row.
        branches: where they branch off; None: none has a parent.
    """

    documents: Documents
    branches: Branches | None = None
    modules: list[nn.Module] = field(default_factory=list)
    calls: list[ModelCall] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    """Flags by call: gradients are kept."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: LayerCall,
    ) -> torch.Tensor:
        """Attention within each document.

        Args:
            module: the model's attention module.
            query: ``[1, num_heads, rows, head_dim]``.
            key: ``[1, num_heads_kv, rows, head_dim]``.
            value: ``[1, num_heads_kv, rows, head_dim_v]``.
            layer: what it asks for.

        Returns:
            o ``[1, rows, num_heads, head_dim_v]``.
        """
        n_rows = sum(self.documents.lengths)
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.shape[2] != n_rows:
                raise UnsupportedModel(
                    f"{type(module).__name__} calls attention with {tensor.shape[2]} rows of "
                    f"{name} for {n_rows} tokens; every token has one row, without cache or pooling"
                )
        scale = query.shape[3] ** -0.5 if layer.scaling is None else layer.scaling
        self.modules.append(module)
        self.trained.append(torch.is_grad_enabled())
        shape = shape_of(*(tensor[0].transpose(0, 1) for tensor in (query, key, value)))
        shape = replace(shape, softcap=layer.softcap, mask=layer.mask)
        self.calls.append(ModelCall(shape, scale, layer.kind))
        o = attend_documents(
            query,
            key,
            value,
            self.documents.lengths,
            scale=scale,
            softcap=layer.softcap,
            sinks=layer.sinks,
            kind=layer.kind,
            mask=layer.mask,
            branches=self.branches,
        )
        return o.transpose(1, 2).contiguous()


_POSITIONS = frozenset({"position_ids"})
_EVERYTHING = frozenset(CHECKED)

current_check: ContextVar[Check | None] = ContextVar("distca_check", default=None)

_checked_models: WeakSet[PreTrainedModel] = WeakSet()
_of_attention: WeakKeyDictionary[nn.Module, DocumentCheck] = WeakKeyDictionary()


def check_of(attention: nn.Module) -> DocumentCheck | None:
    """The check of the model that the attention module belongs to, if it was checked."""
    return _of_attention.get(attention)


def refuse_own_positions(model: nn.Module) -> None:
    """Refuses to pack a padded batch for a model that counts positions otherwise than from 0 up."""
    checks = (check_of(module) for module in model.modules())
    if not all(check.counts_from_zero for check in checks if check is not None):
        raise UnsupportedModel(
            f"{type(model).__name__} gets a padded batch without position_ids and does not count "
            "positions from 0; pack documents with position_ids that restart at 0"
        )


def refuse_branches(model: nn.Module) -> None:
    """Refuses documents that share prefixes for a model that carries state from token to token."""
    for check in map(check_of, model.modules()):
        if check is not None and check.branch_fault:
            raise UnsupportedModel(
                f"{type(model).__name__} takes no documents that share prefixes, since "
                f"{check.branch_fault}; give it each sample whole"
            )


def check_documents(model: nn.Module) -> DocumentCheck:
    """Finds out whether a model of transformers computes each packed document as if it were alone.

    Runs a few forwards of some tokens, without gradients; dropout is off, and the state of the
    model and of random number generators is kept. Weights must be there and have values. If they
    are sharded, all ranks must call it together.

    Args:
        model: loaded with ``attn_implementation="distca"``, or a module that holds one such model.
    """
    models = list(_outermost(model))
    if len(models) != 1:
        raise ValueError(
            f"{type(model).__name__} holds {len(models)} models of transformers with "
            f"attn_implementation={IMPLEMENTATION!r}; give the one that is to be checked"
        )
    return _check(models[0], _EVERYTHING)


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The modules in ``model`` that call core attention, found by checking it if it was not."""
    for each in _outermost(model):
        if each not in _checked_models:
            _check(each, _EVERYTHING)
    return [module for module in model.modules() if module in _of_attention]


def _check(model: PreTrainedModel, arguments: frozenset[str]) -> DocumentCheck:
    """Checks with position_ids alone, and with all ``arguments`` if that shows a fault: there are
    layers that go by cu_seq_lens or seq_idx."""
    training = model.training
    with _undisturbed(model):
        found = _Checker(model, _POSITIONS, training=training).run()
        if found.fault and arguments > _POSITIONS:
            # Some kinds of layers refuse the others where they cannot follow them.
            with contextlib.suppress(UnsupportedModel):
                found = _Checker(model, arguments, training=training).run()
    _checked_models.update(m for m in model.modules() if isinstance(m, PreTrainedModel))
    return found


def hook_before_forward(model: PreTrainedModel) -> None:
    """Has ``model`` checked before its first forward in a step, and what it is called with compared
    with the manifest before each. Idempotent."""
    if _before_forward not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_before_forward, with_kwargs=True)
        model.register_forward_hook(_after_forward, always_call=True)


@outside_graphs
def _before_forward(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if _is_unplanned(model):
        for attach in open_door if model not in entrances else ():
            attach(model)
        if (entrance := entrances.get(model)) is not None:
            named = entrance.enter(model, dict(_arguments(model, args, kwargs)))
            check_given(model, (), named)
            return (), named
    check_given(model, args, kwargs)
    # With a cache of fixed size, generation makes the mask beside the model and hands it over,
    # which models take as a tensor.
    masks = {name: value for name, value in kwargs.items() if isinstance(value, HomeMask)}
    if not masks:
        return None
    return args, {**kwargs, **{name: mask.tensor for name, mask in masks.items()}}


@outside_graphs
def _after_forward(model: PreTrainedModel, _: tuple[Any, ...], output: Any) -> Any:
    entrance = entrances.get(model)
    return None if entrance is None else entrance.leave(model, output)


def _is_unplanned(model: PreTrainedModel) -> bool:
    """Return whether a forward of ``model`` with served attention begins outside of any step."""
    return (current_lane.get() or current_step.get()) is None and _is_served_here(model)


def _is_served_here(model: PreTrainedModel) -> bool:
    """Return whether servers compute the attention of a forward of ``model`` that begins now."""
    if current_check.get() is not None or is_at_home():
        return False
    return not is_shape_inference(Checkpoints().recomputed) and _asks_for_us(model)


def check_given(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compares what ``model`` is called with in a step with what was planned."""
    if (current_lane.get() or current_step.get()) is None or not _is_served_here(model):
        return
    told = {
        name: value
        for name, value in _arguments(model, args, kwargs).items()
        if name in CHECKED and isinstance(value, torch.Tensor) and value.dim() <= 2
    }
    if model not in _checked_models and not needs_other_ranks(model):
        _check(model, _POSITIONS | frozenset(told))
    # What reaches attention is checked there too, but some models hand nothing on.
    documents_of(require_lane()).check(told)


def _arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name."""
    if not args:
        return kwargs
    names = inspect.signature(model.forward).parameters
    return {**dict(zip(names, args, strict=False)), **kwargs}


def is_served_model(module: nn.Module) -> bool:
    """Return whether ``module`` is or holds a model of transformers that asks for served
    attention."""
    return next(_outermost(module), None) is not None


def _outermost(model: nn.Module) -> Iterator[PreTrainedModel]:
    if isinstance(model, PreTrainedModel) and _asks_for_us(model):
        yield model
        return
    for child in model.children():
        yield from _outermost(child)


def _asks_for_us(model: nn.Module) -> bool:
    return any(
        isinstance(module, PreTrainedModel)
        and module.config._attn_implementation in (IMPLEMENTATION, REPLACED or IMPLEMENTATION)
        for module in model.modules()
    )


class _Checker:
    """Checks one model with one set of arguments."""

    def __init__(self, model: PreTrainedModel, names: frozenset[str], *, training: bool) -> None:
        self._model = model
        self._names = names
        self._training = training
        self._name = type(model).__name__
        self._device = next(model.parameters()).device
        self._n_tokens = max(_vocabulary(model) - _SPECIAL_TOKENS, 2)
        self._lengths = [length * n_shares(model) for length in LENGTHS]

    def run(self) -> DocumentCheck:
        """Finds the calls, and the fault."""

        if self._device.type == "meta":
            raise UnsupportedModel(
                f"{self._name} is on the meta device; give its weights values before it is checked"
            )
        modules = self._modules()
        fault = self._tried(self._fault)
        branch_fault = fault or self._tried(self._branch_fault)
        counts_from_zero = self._counts_from_zero()
        for module in modules:
            module.training = self._training
        # So that what attention is asked for in training only is refused too. Weights that other
        # ranks have a part of would be gathered for a backward pass that does not come.
        with torch.set_grad_enabled(not needs_other_ranks(self._model)):
            check = self._forward(self._draw(0))[1]
        self._require_trained_to_the_top(check)
        found = DocumentCheck(
            tuple(check.calls),
            _POSITIONS if fault else self._names,
            fault,
            counts_from_zero,
            branch_fault,
        )
        _of_attention.update((module, found) for module in modules)
        return found

    def _tried(self, fault: Callable[[int], str]) -> str:
        """The finding of ``fault`` with whatever tokens."""
        found = ""
        for seed in range(TRIES):
            found = fault(seed)
            if not found:
                break
        return found

    def _require_trained_to_the_top(self, check: Check) -> None:
        if not any(check.trained):
            return
        lowest = check.trained.index(True)
        if False in check.trained[lowest:]:
            skipped = check.trained.index(False, lowest)
            raise UnsupportedModel(
                f"{self._name} runs call {skipped} of core attention under torch.no_grad, after "
                f"call {lowest}, which trains; train all calls above the lowest that trains"
            )

    def _modules(self) -> list[nn.Module]:
        """Those that call attention."""
        modules = self._forward(self._draw(0))[1].modules
        if not modules:
            raise UnsupportedModel(f"{self._name} cannot be served: {_why_no_calls(self._model)}")
        return modules

    def _fault(self, seed: int) -> str:
        """The reason to take one document a row only; empty if these tokens do not show one."""
        first, middle, last = self._draw(seed)
        outputs, _ = self._forward([first, middle, last])
        scale = max(float(output.abs().max()) for output in outputs)
        if not 0 < scale < math.inf:
            raise UnsupportedModel(
                f"{self._name} cannot be checked: its outputs are {scale}; load or initialise its "
                "weights first"
            )
        other = last.clone()
        other[0] = (last[0] - _SPECIAL_TOKENS + 1) % self._n_tokens + _SPECIAL_TOKENS
        if isinstance(masked := getattr(self._model.config, "mask_token_id", None), int):
            # ESM scales all of a row by how many tokens of it are masked.
            other[0] = masked
        beside, _ = self._forward([first, middle, other])
        if _difference(beside[2][-1:], outputs[2][-1:]) == 0:
            raise UnsupportedModel(
                f"{self._name} cannot be checked: no token's output depends on the tokens before "
                "it; load or initialise its weights first"
            )
        swapped, _ = self._forward([last, middle, first])
        again, _ = self._forward([first, middle, last])
        noise = max(_difference(*pair) for pair in zip(again, outputs, strict=True))
        moved = max(_difference(swapped[2], outputs[0]), _difference(swapped[0], outputs[2]))
        for change, cause in (
            (_difference(swapped[1], outputs[1]), _MIXES),
            (_difference(beside[1], outputs[1]), _COUNTS_THE_ROW),
            (moved, _COUNTS_POSITIONS),
        ):
            if change > max(self._tolerance * scale, 2 * noise):
                return f"a document's outputs change by {change / scale:.0e} with {cause}"
        return ""

    def _branch_fault(self, seed: int) -> str:
        """The reason to take no documents that share prefixes; empty if these tokens show none: the
        last one, behind the first in the tree and a stranger in the row, is as it is alone."""
        first, middle, last = self._draw(seed)
        begins = (len(first), len(first) + len(middle))
        of_tree = (0, 0, begins[0]), (begins[0], 0, len(middle)), (begins[1], begins[0], len(last))
        of_path = [(0, 0, len(first) + len(last))]
        branches = Branches((0, 0, begins[0]), (NO_PARENT, NO_PARENT, 0))

        def rows(ids: list[torch.Tensor], check: Check) -> torch.Tensor:
            output = self._call(torch.cat(ids)[None], check, self._names)
            return on_host(output[0, -len(last) :].double())

        where = "the check of branches"
        try:
            once, again = (
                rows([first, middle, last], Check(Documents(where, of_tree), branches))
                for _ in range(2)
            )
            alone = rows([first, last], Check(Documents(where, of_path)))
        except UnsupportedModel as error:
            return str(error)
        change, scale = _difference(once, alone), float(alone.abs().max())
        if change <= max(self._tolerance * scale, 2 * _difference(once, again)):
            return ""
        return f"a branch's outputs change by {change / scale:.0e} with {_MIXES}"

    def _counts_from_zero(self) -> bool:
        """Return whether one document alone gives the same with its positions and without any, but
        for what differs between two equal passes. A model that does not run without them counts
        none by itself."""
        ids = self._draw(0)[0][None]

        def output(names: frozenset[str]) -> torch.Tensor:
            documents = Documents("the check of positions", [(0, 0, self._lengths[0])])
            return self._call(ids, Check(documents), names)

        try:
            told, untold = output(_POSITIONS), output(frozenset())
        except UnsupportedModel:
            return True
        difference = _difference(told, untold)
        if difference <= self._tolerance * float(told.abs().max()):
            return True
        return difference <= 2 * _difference(output(_POSITIONS), told)

    @property
    def _tolerance(self) -> float:
        """That of what the forward computes in."""
        kind, dtype = self._device.type, self._model.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        return _TOLERANCES.get(dtype, _TOLERANCES[torch.float32])

    def _draw(self, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [
            torch.randint(0, self._n_tokens, (length,), generator=generator) + _SPECIAL_TOKENS
            for length in self._lengths
        ]

    def _forward(self, documents: list[torch.Tensor]) -> tuple[list[torch.Tensor], Check]:
        """Outputs by document, and what was called."""
        n_rows = sum(self._lengths)
        begins = itertools.accumulate(self._lengths[:-1], initial=0)
        segments = [(row, 0, length) for row, length in zip(begins, self._lengths, strict=True)]
        check = Check(Documents("the check of documents", segments))
        output = self._call(torch.cat(documents)[None], check, self._names)
        if output.dim() != 3 or output.shape[1] != n_rows:
            raise UnsupportedModel(
                f"{self._name} gives outputs of shape {tuple(output.shape)} for {n_rows} tokens; "
                "it must give [1, tokens, ...]"
            )
        return list(on_host(output[0].double()).split(self._lengths)), check

    def _call(self, ids: torch.Tensor, check: Check, names: frozenset[str]) -> torch.Tensor:
        told = {n: v for n, v in _everything(check.documents).items() if n in names}
        inside: list[torch.Tensor] = []
        hook = self._model.base_model.register_forward_hook(
            lambda _module, _given, output: inside.append(_main_output(output))
        )
        token = current_check.set(check)
        try:
            output = self._model(
                **self._tokens(ids),
                use_cache=False,
                **{
                    name: value.to(self._device) if isinstance(value, torch.Tensor) else value
                    for name, value in told.items()
                },
            )
        except UnsupportedModel as error:
            raise type(error)(f"{self._name} cannot be served: {error}") from error
        except Exception as error:
            raise UnsupportedModel(
                f"{self._name} cannot be served: {_why_it_failed(self._model)} "
                f"({type(error).__name__}: {error})"
            ) from error
        finally:
            current_check.reset(token)
            hook.remove()
        found = _main_output(output)
        # A head that has one output a row, as of reward models, stands on one that has all.
        return found if found.shape[1:2] == ids.shape[1:] or not inside else inside[-1]

    def _tokens(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Tokens for the model: vectors, if a stage below embeds them."""
        if _embeds(self._model):
            return {"input_ids": ids.to(self._device)}
        generator = torch.Generator().manual_seed(0)
        width = self._model.config.get_text_config().hidden_size
        frequencies = torch.rand(width, generator=generator)
        vectors = (ids[..., None] * frequencies).sin()
        return {"inputs_embeds": vectors.to(self._device, self._model.dtype)}


def _everything(documents: Documents) -> dict[str, Any]:
    """All arguments that may show a model its documents."""
    lengths = torch.tensor(documents.lengths)
    cumulative = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return {
        "position_ids": documents.positions[None],
        "cu_seq_lens_q": cumulative,
        "cu_seq_lens_k": cumulative,
        "seq_idx": torch.arange(len(lengths)).repeat_interleave(lengths)[None].int(),
    }


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def _main_output(output: Any) -> torch.Tensor:
    for name in ("logits", "last_hidden_state"):
        if isinstance(found := getattr(output, name, None), torch.Tensor):
            return found
    first: torch.Tensor = output[0]
    return first


def _embeds(model: PreTrainedModel) -> bool:
    """Return whether the model has embeddings of tokens, as far as that shows."""
    base: Any = model.base_model
    # Stages are made of whole models by setting the parts that they do not have to None.
    embeddings = getattr(base, getattr(base, "_input_embed_layer", "embed_tokens"), base)
    return embeddings is not None and not isinstance(embeddings, nn.Identity)


def _vocabulary(model: PreTrainedModel) -> int:
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    if isinstance(size, int):
        return size
    untyped: Any = model
    return int(untyped.get_input_embeddings().weight.shape[0])


def _why_no_calls(model: PreTrainedModel) -> str:
    if has_attention_interface(type(model)):
        return (
            "it calls no attention through transformers' attention interface; it has none, or only "
            "other kinds of layers (recurrent, for example)"
        )
    return no_interface(model.config)


def _why_it_failed(model: PreTrainedModel) -> str:
    if getattr(model.config.get_text_config(), "index_topk", None) is not None:
        return "it chooses keys by an index (index_topk), and sparse attention is not supported"
    return "it does not run on one row of packed documents, given as input_ids and position_ids"


def no_interface(config: PretrainedConfig) -> str:
    """The reason to refuse a model that does not use the attention interface."""
    adds_alibi = getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt")
    return (
        f"model type {config.model_type!r} computes attention by itself, not through "
        "transformers' attention interface"
        + (" (and adds ALiBi biases, which are not supported)" if adds_alibi else "")
        + "; train it with attn_implementation='eager', or choose another model type"
    )


def has_attention_interface(model_class: type[PreTrainedModel]) -> bool:
    """Return whether the class looks its attention up by name in transformers' registry."""
    for name, classes in vars(sys.modules[model_class.__module__]).items():
        if name.endswith("ATTENTION_CLASSES") and isinstance(classes, dict):
            return IMPLEMENTATION in classes
    ask: Callable[[], bool] | None = getattr(model_class, "_can_set_attn_implementation", None)
    return ask is None or ask()


@contextlib.contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Puts ``model`` into evaluation for the block; leaves it, autocast's cache and random number
    generators as they were. Nothing compiled runs, and nothing is compiled."""
    modes = [(module, module.training) for module in model.modules()]
    with untouched(model), _noise_for_zeros(model), gathered_as_before(model), uncompiled():
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


@contextlib.contextmanager
def _noise_for_zeros(model: nn.Module) -> Iterator[None]:
    """Weights that are zero everywhere, as the last projection of a block or an adapter may be at
    the start, would hide what is before them: for the block they are small random numbers."""
    zeros = [
        parameter
        for parameter in model.parameters()
        # Weights that are sharded or quantised know no such operations, or not as they are.
        if not is_traceable_wrapper_subclass(parameter)
        and parameter.is_floating_point()
        and not parameter.is_meta
        and not bool(parameter.any())
    ]
    for parameter in zeros:
        generator = torch.Generator(parameter.device).manual_seed(0)
        # Not written through autograd's eyes: a graph that has saved the weight stays valid.
        parameter.data.normal_(std=0.02, generator=generator)
    try:
        yield
    finally:
        for parameter in zeros:
            parameter.data.zero_()
