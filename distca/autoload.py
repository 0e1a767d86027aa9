"""Registers ``attn_implementation="distca"`` when the first model of transformers asks for it, or
for the implementation that ``DISTCA_REPLACES`` names.

Nobody needs to import anything for it: torch loads this module as it loads its backends, by an
entry point. Torch and transformers are loaded only where they are used.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_MODELS = "transformers.modeling_utils"
_ASKED = ("_check_and_adjust_attn_implementation", "get_correct_attn_implementation")
"""Methods that every model asks about its implementation when it is built."""


def watch_transformers() -> None:
    """Has the first model of transformers that asks for the implementation bring it. Idempotent."""
    if (module := sys.modules.get(_MODELS)) is not None and hasattr(module, "PreTrainedModel"):
        _watch(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _watch(module: ModuleType) -> None:
    kind: Any = module.__dict__["PreTrainedModel"]
    served = {"distca", os.environ.get("DISTCA_REPLACES") or "distca"}
    originals = {name: getattr(kind, name) for name in _ASKED if hasattr(kind, name)}
    ours: dict[str, Callable[..., Any]] = {}

    def first(name: str) -> Callable[..., Any]:
        @functools.wraps(originals[name])
        def asked(self: Any, *args: Any, **kwargs: Any) -> Any:
            asks = next(iter([*args, *kwargs.values()]), None)
            if getattr(kind, name) is not asked or asks not in served:
                # What has replaced it stands on it.
                return originals[name](self, *args, **kwargs)
            for each, original in originals.items():
                if getattr(kind, each) is ours[each]:
                    setattr(kind, each, original)
            import_module("trainer_client.attach")
            return getattr(kind, name)(self, *args, **kwargs)

        return asked

    ours.update((name, first(name)) for name in originals)
    for name, asked in ours.items():
        setattr(kind, name, asked)


class _Finder(MetaPathFinder):
    """Finds the module of models once, by the other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See :class:`importlib.abc.MetaPathFinder`."""
        if fullname != _MODELS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads as ``inner`` does, and watches what it has loaded."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See :class:`importlib.abc.Loader`."""
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """See :class:`importlib.abc.Loader`."""
        self._inner.exec_module(module)
        _watch(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
