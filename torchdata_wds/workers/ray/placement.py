"""Where an actor may run: which of a cluster's nodes are avoided in place of a lost one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NODE = "ray.io/node-id"  # a label that Ray gives each node


def away_from(options: Mapping[str, Any], node: str | None) -> dict[str, Any]:
    """Returns an actor's options by which it runs on another node, if another one has room.

    A cluster takes up to 20 s to notice that a node was killed. It would place actors there that never start.
    """
    # Strategies that name a node or a placement group leave no choice.
    is_placed = not isinstance(options.get("scheduling_strategy", "DEFAULT"), str) or "placement_group" in options
    selector = options.get("label_selector") or {}
    if node is None or is_placed or options.get("fallback_strategy") or _NODE in selector:
        return dict(options)
    chosen = {"label_selector": {**selector, _NODE: f"!in({node})"}}
    return {**options, **chosen, "fallback_strategy": [{"label_selector": dict(selector)}]}
