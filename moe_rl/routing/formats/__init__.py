"""Importers: routing recorded by other engines and trainers, as checked RoutingTraces.

Every importer takes the layers and K from a ModelRouting and never guesses them, drops dense layers by their
index, accepts a row for every token (N) or for all but the last (N - 1), says which in `trace.valid`, and
raises RoutingError for whatever could turn into a wrong trace.
"""

from moe_rl.routing.formats.engines import from_flashinfer, from_sglang, from_tunix, from_vllm
from moe_rl.routing.formats.geometry import ModelRouting
from moe_rl.routing.formats.megatron import (
    from_megatron,
    from_megatron_inference,
    from_miles_dump,
    from_router_tracer,
)
from moe_rl.routing.formats.rows import align_to_mask
from moe_rl.routing.formats.trainers import (
    from_nemo_rl,
    from_prime_rl,
    from_skyrl,
    from_slime,
    from_verl,
    from_verl_jagged,
)

__all__ = [
    "ModelRouting",
    "align_to_mask",
    "from_flashinfer",
    "from_megatron",
    "from_megatron_inference",
    "from_miles_dump",
    "from_nemo_rl",
    "from_prime_rl",
    "from_router_tracer",
    "from_sglang",
    "from_skyrl",
    "from_slime",
    "from_tunix",
    "from_verl",
    "from_verl_jagged",
    "from_vllm",
]
