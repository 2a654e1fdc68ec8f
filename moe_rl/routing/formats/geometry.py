"""ModelRouting: what an importer must know of a model, and must never guess from a payload."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from transformers import AutoModel, PretrainedConfig

from moe_rl.routing.routers import find_routers
from moe_rl.routing.trace import RoutingError


@dataclass(frozen=True)
class ModelRouting:
    """The layers and routers of a model.

    num_hidden_layers  all decoder layers, dense ones included; multi-token prediction layers are not.
    moe_layer_ids      indices of the MoE layers among them, ascending.
    num_experts        E, logical experts.
    top_k              K, experts per token; shared experts are not counted.

    Raises RoutingError when the fields do not fit each other.
    """

    num_hidden_layers: int
    moe_layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        layers = tuple(int(layer) for layer in self.moe_layer_ids)
        object.__setattr__(self, "moe_layer_ids", layers)
        if any(after <= before for before, after in pairwise(layers)):
            raise RoutingError(
                f"moe_layer_ids must ascend without repeats, got {layers}. Rollout engines keep one routing "
                "row per layer, so a model whose layers hold two routers cannot be imported"
            )
        if not layers or layers[0] < 0 or layers[-1] >= self.num_hidden_layers:
            raise RoutingError(
                f"moe_layer_ids must name layers below num_hidden_layers = {self.num_hidden_layers}, got "
                f"{layers}"
            )
        if not 0 < self.top_k <= self.num_experts:
            raise RoutingError(f"top_k = {self.top_k} must be between 1 and num_experts = {self.num_experts}")

    @classmethod
    def from_model(cls, model: nn.Module) -> ModelRouting:
        """Of a transformers model, as `find_routers` sees it. Raises RoutingError for a dense model."""
        routers = find_routers(model)
        sizes = {(router.num_experts, router.top_k) for router in routers}
        if len(sizes) > 1:
            raise RoutingError(
                f"the routers differ in (experts, K): {sorted(sizes)}; a trace has one of each"
            )
        configs = (getattr(module, "config", None) for module in model.modules())
        config = next(config for config in configs if isinstance(config, PretrainedConfig))
        num_experts, top_k = sizes.pop()
        layers = tuple(router.layer_id for router in routers)
        return cls(config.get_text_config().num_hidden_layers, layers, num_experts, top_k)

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> ModelRouting:
        """Of a transformers config, or the text part of one.

        The model is built without weights, so that every family's own rule says which layers are dense.
        Raises RoutingError for a dense model, and for a config that transformers builds no model of.
        """
        try:
            with torch.device("meta"):
                model = AutoModel.from_config(config.get_text_config())
        except Exception as error:  # impossible sizes fail somewhere in the family's own code
            raise RoutingError(
                f"transformers builds no model of this {type(config).__name__}: {error}"
            ) from error
        return cls.from_model(model)
