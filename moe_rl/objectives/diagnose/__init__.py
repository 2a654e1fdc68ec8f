"""Which objective, aggregation and advantage convention reproduce a loss that another trainer logged."""

from __future__ import annotations

from moe_rl.objectives.diagnose.choices import Settings
from moe_rl.objectives.diagnose.clip_range import solve_clip_width
from moe_rl.objectives.diagnose.dump import Dump, make_dump, read_dump
from moe_rl.objectives.diagnose.explain import peer_settings, why_indistinguishable
from moe_rl.objectives.diagnose.files import DumpError
from moe_rl.objectives.diagnose.search import Diagnosis, Match, diagnose, reproduce_advantages

__all__ = [
    "Diagnosis",
    "Dump",
    "DumpError",
    "Match",
    "Settings",
    "diagnose",
    "make_dump",
    "peer_settings",
    "read_dump",
    "reproduce_advantages",
    "solve_clip_width",
    "why_indistinguishable",
]
