"""The configs of ``dapo_full``, as the recipe reads them."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from dapo_components.training.config import build, parse_config
from tests.recipes.recipe_runs import ROOT, recipe_module

CONFIGS = ROOT / "recipes" / "configs"
RECIPE = recipe_module()


def raw(path: Path) -> dict[str, Any]:
    """Return the config's values, interpolations resolved."""
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def load(name: str, **overrides: Any) -> Any:
    return parse_config({**raw(CONFIGS / f"{name}.yaml"), **overrides}, RECIPE.DAPOConfig)


def meta_model(node: Mapping[str, Any]) -> Any:
    """Build a model without storage, once for all configs that share it."""
    return _meta_model(json.dumps(node))


@functools.cache
def _meta_model(node: str) -> Any:
    with torch.device("meta"):
        return build(json.loads(node))


def is_dapo(path: Path) -> bool:
    """Whether a config is for this recipe; the command in its first lines says so."""
    return f"recipes/dapo_full.py --config {path.relative_to(ROOT)}" in path.read_text("utf-8")


ALL = sorted(str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.rglob("*.yaml") if is_dapo(path))
ABLATION = [name for name in ALL if name.startswith("ablation/")]
QWEN_32B = ["qwen2_5_32B_dapo", *ABLATION]
