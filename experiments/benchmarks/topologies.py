"""Routing of published models, and random traces of it."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import numpy as np
import torch

from moe_rl.routing import RoutingTrace


@dataclass(frozen=True)
class Topology:
    """MoE layers, experts and experts per token, as in the model's config."""

    name: str
    layers: int
    experts: int
    top_k: int

    @property
    def subset_bits(self) -> int:
        """⌈log2 C(E, K)⌉: bits of a token's set of experts in one layer, in any code of fixed length."""
        return (comb(self.experts, self.top_k) - 1).bit_length()


TOPOLOGIES = (
    Topology("Qwen3-30B-A3B", 48, 128, 8),
    Topology("Qwen3-235B-A22B", 94, 128, 8),
    Topology("DeepSeek-V3", 58, 256, 8),
    Topology("Kimi-K2", 60, 384, 8),
    Topology("gpt-oss-120b", 36, 128, 4),
    Topology("Mixtral-8x7B", 32, 8, 2),
    Topology("Llama-4-Scout", 48, 16, 1),
    Topology("Qwen3-Next-80B-A3B", 48, 512, 10),
)


def random_trace(topology: Topology, sequences: int, tokens: int) -> RoutingTrace:
    """Every set of experts equally likely, in random order: 4096 draws, repeated in random places."""
    rng = np.random.default_rng(0)
    draws = rng.random((4096, topology.experts)).argsort(1)[:, : topology.top_k]
    places = rng.integers(len(draws), size=(sequences, tokens, topology.layers))
    valid = torch.ones(sequences, tokens, dtype=torch.bool)
    layer_ids = tuple(range(topology.layers))
    return RoutingTrace(torch.from_numpy(draws[places]), valid, layer_ids, topology.experts).compact()
