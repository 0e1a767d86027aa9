"""``distca attention-node``: a server of the pool."""

from __future__ import annotations

from attention_node.settings import NodeSettings
from distca.options import options_from


@options_from
def attention_node(settings: NodeSettings) -> None:
    """Run an attention node: it joins the pool and serves core attention."""
    from attention_node.server import run

    run(settings)
