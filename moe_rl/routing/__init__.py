"""Record and replay expert routing of Mixture-of-Experts models, and measure how it changes."""

from moe_rl.routing.drift import ExpertChange, expert_change, expert_load, max_violation
from moe_rl.routing.record import Recorder, record_routing
from moe_rl.routing.replay import Replay, replay_routing
from moe_rl.routing.routers import Router, find_routers, has_routers, router_gets_gradient
from moe_rl.routing.storage import TraceFile
from moe_rl.routing.stream import TraceStream, TraceWriter
from moe_rl.routing.tokens import hash_tokens
from moe_rl.routing.trace import RoutingError, RoutingTrace
from moe_rl.routing.variants import OldWeights, Threshold, scoring_rows

__all__ = [
    "ExpertChange",
    "OldWeights",
    "Recorder",
    "Replay",
    "Router",
    "RoutingError",
    "RoutingTrace",
    "Threshold",
    "TraceFile",
    "TraceStream",
    "TraceWriter",
    "expert_change",
    "expert_load",
    "find_routers",
    "has_routers",
    "hash_tokens",
    "max_violation",
    "record_routing",
    "replay_routing",
    "router_gets_gradient",
    "scoring_rows",
]
