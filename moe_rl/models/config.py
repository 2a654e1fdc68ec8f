"""Which model to train: a transformers architecture built from its config, or a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

EXPERTS = ("eager", "grouped_mm", "batched_mm", "megablocks")


class ModelError(ValueError):
    """The configured model cannot be built, loaded or trained."""


@dataclass
class UpcycleConfig:
    """How a dense checkpoint becomes a MoE; see `moe_rl.models.upcycle`."""

    num_experts: int = 4  # E, copies of the dense MLP in every layer
    top_k: int = 2  # K, experts per token, their gate weights normalised to sum to 1
    noise: float = 0.0  # added to every expert, relative to the standard deviation of its matrix

    def check(self) -> None:
        """Raise `ValueError` for options that make no MoE."""
        if not 2 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"model.upcycle.top_k={self.top_k} of num_experts={self.num_experts}: expected 2 to "
                "num_experts (the weight of a single expert is always 1: its router would get no gradient)"
            )
        if not 0 <= self.noise < float("inf"):
            raise ValueError(f"model.upcycle.noise={self.noise}: expected a fraction, at least 0")


@dataclass
class ModelConfig:
    """`source` says which of the groups of options below count."""

    name: str = "tiny"
    # config: random weights from `architecture` and `config`; checkpoint: `path`; upcycled: the dense `path`
    source: str = "config"
    dtype: str = "float32"  # of the weights: float32 or float64; see `check`
    experts: str | None = (
        None  # what runs them: eager, grouped_mm, batched_mm or megablocks; null: the default
    )

    # source=config
    architecture: str = "qwen3_moe"  # transformers' model_type
    config: dict[str, Any] = field(default_factory=dict)  # fields of that architecture's config class
    # of the random weights; of the routers and the noise of source=upcycled; null: the run's own
    seed: int | None = 0

    # source=checkpoint and source=upcycled
    path: str | None = None  # directory, hub name, GGUF file or package:NAME; its own tokenizer is used
    trust_remote_code: bool = False

    # source=upcycled
    upcycle: UpcycleConfig | None = None

    @property
    def own_seed(self) -> int:
        """`seed`, a number. Raises `ValueError` for null, which a run replaces by its seed."""
        if self.seed is None:
            raise ValueError("model.seed=null is the seed of a run, and here is none: give a number")
        return self.seed

    def check(self) -> None:
        """Raise `ValueError` for options that contradict each other."""
        if self.source not in ("config", "checkpoint", "upcycled"):
            raise ValueError(f"model.source={self.source!r}: expected config, checkpoint or upcycled")
        if self.dtype == "bfloat16":
            raise ValueError(
                "model.dtype=bfloat16: AdamW's steps at RL learning rates are smaller than the spacing of "
                "bfloat16 weights and would be rounded away; train float32 weights"
            )
        if self.dtype not in ("float32", "float64"):
            raise ValueError(f"model.dtype={self.dtype!r}: expected float32 or float64")
        if self.experts not in (None, *EXPERTS):
            raise ValueError(f"model.experts={self.experts}: expected {', '.join(EXPERTS)} or null")
        if self.source != "config" and not self.path:
            raise ValueError(f"model.source={self.source} needs model.path=DIRECTORY_OR_HUB_NAME")
        if self.source == "config" and self.path:
            raise ValueError(
                f"model.path={self.path} is read by model=checkpoint and model=upcycled only: add one of "
                "them, or drop it"
            )
        if (self.source == "upcycled") != (self.upcycle is not None):
            raise ValueError("model.upcycle goes with model.source=upcycled, and that needs it")
        if self.upcycle is not None:
            self.upcycle.check()
