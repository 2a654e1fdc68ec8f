"""What was sampled ahead for the next step (partial rollout), as tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_rl.routing import RoutingTrace
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.sampler import Sampled

PREFIX = "ahead|"


def ahead_tensors(ahead: Sampled | None) -> dict[str, Tensor]:
    """Everything of `ahead` by name, empty for None: its weights are gone when the run is continued."""
    if ahead is None:
        return {}
    found = ahead.batch.tensors() | {"prompt_length": torch.tensor(ahead.batch.prompt_length)}
    trace = ahead.trace
    if trace is not None:
        assert trace.weights_version is not None
        found |= {
            "trace_experts": trace.experts,
            "trace_valid": trace.valid,
            "trace_layer_ids": torch.tensor(trace.layer_ids),
            "trace_sizes": torch.tensor([trace.num_experts, trace.weights_version]),
        }
    return {PREFIX + name: tensor for name, tensor in found.items()}


def restore_ahead(tensors: Mapping[str, Tensor], device: torch.device) -> Sampled | None:
    """`ahead_tensors` back from among a checkpoint's tensors; None where there are none."""
    found: dict[str, Any] = {
        name.removeprefix(PREFIX): tensor.to(device)
        for name, tensor in tensors.items()
        if name.startswith(PREFIX)
    }
    if not found:
        return None
    traced = {name: found.pop(name) for name in list(found) if name.startswith("trace_")}
    length = int(found.pop("prompt_length"))
    batch = RolloutBatch(**found, prompt_length=length)
    if not traced:
        return Sampled(batch)
    num_experts, version = traced["trace_sizes"].tolist()
    layers = tuple(traced["trace_layer_ids"].tolist())
    trace = RoutingTrace(
        traced["trace_experts"], traced["trace_valid"], layers, num_experts, weights_version=version
    )
    return Sampled(batch, trace)
