"""Evaluation protocols: Pass@1 and pass@k, math sets, code run in a sandbox, Elo ratings."""

from moe_rl.evaluation.code_set import CodeSet, extract_code, read_code_set
from moe_rl.evaluation.grade import EvaluationSet, Grade
from moe_rl.evaluation.isolation import SandboxUnavailableError
from moe_rl.evaluation.math_set import MathSet, read_math_set
from moe_rl.evaluation.pass_at_k import Rate, mean_pass_at_1, mean_pass_at_k, pass_at_k
from moe_rl.evaluation.probe import open_sandbox
from moe_rl.evaluation.ratings import Rating, elo_rating
from moe_rl.evaluation.sandbox import Limits, Outcome, Sandbox, SandboxError

__all__ = [
    "CodeSet",
    "EvaluationSet",
    "Grade",
    "Limits",
    "MathSet",
    "Outcome",
    "Rate",
    "Rating",
    "Sandbox",
    "SandboxError",
    "SandboxUnavailableError",
    "elo_rating",
    "extract_code",
    "mean_pass_at_1",
    "mean_pass_at_k",
    "open_sandbox",
    "pass_at_k",
    "read_code_set",
    "read_math_set",
]
