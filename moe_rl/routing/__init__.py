"""Record and replay expert routing of Mixture-of-Experts models, and measure how it changes.

What needs a live model is imported when it is asked for: traces, their files and measures of drift work where
transformers is not installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moe_rl.routing.drift import ExpertChange, expert_change, expert_load, max_violation
from moe_rl.routing.monitor import DriftMonitor
from moe_rl.routing.storage import TraceFile
from moe_rl.routing.stream import TraceStream, TraceWriter
from moe_rl.routing.tokens import hash_tokens
from moe_rl.routing.trace import RoutingError, RoutingTrace
from moe_rl.routing.variants import OldWeights, Threshold, scoring_rows

if TYPE_CHECKING:
    from moe_rl.routing.record import Recorder, record_routing
    from moe_rl.routing.replay import Replay, replay_routing
    from moe_rl.routing.routers import Router, find_routers, has_routers, router_gets_gradient

_OF_LIVE_MODELS = {
    "Recorder": "record",
    "record_routing": "record",
    "Replay": "replay",
    "replay_routing": "replay",
    "Router": "routers",
    "find_routers": "routers",
    "has_routers": "routers",
    "router_gets_gradient": "routers",
}
__all__ = [
    "DriftMonitor",
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


def __getattr__(name: str) -> Any:
    if name in _OF_LIVE_MODELS:
        return getattr(import_module(f"{__name__}.{_OF_LIVE_MODELS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
