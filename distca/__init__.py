"""DistCA: core attention disaggregation. Users import this package alone.

Names are imported when they are first asked for, so that the command line and the services need no
torch. Their types are in ``__init__.pyi``.
"""

from importlib import import_module
from typing import Any

from distca.autoload import watch_transformers

__version__ = "0.1.0"

_MODULES = {
    "Attached": "trainer_client.attach",
    "ahead": "trainer_client.attach.ahead",
    "at_home": "trainer_client.local_attention.at_home",
    "attach": "trainer_client.attach",
    "core_attention": "trainer_client.attach.own_forwards",
    "flash_attn_func": "trainer_client.attach.own_forwards",
    "flash_attn_varlen_func": "trainer_client.attach.own_forwards",
    "labels_per_rank": "trainer_client.loops.loss_weight",
    "log_scalars": "trainer_client.attach",
    "pack_nested_tree": "trainer_client.loops.tree_batches",
    "pack_padded_tree": "trainer_client.loops.tree_batches",
    "pack_tree": "trainer_client.loops.tree",
    "served_forward": "trainer_client.local_attention.at_home",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


watch_transformers()
