"""Which model to train: a transformers architecture built from its config, or a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

EXPERTS = ("eager", "grouped_mm", "batched_mm", "megablocks")


class ModelError(ValueError):
    """The configured model cannot be built, loaded or trained."""


@dataclass
class ModelConfig:
    """`source` says which of the two groups of options below counts."""

    name: str = "tiny"
    source: str = "config"  # config: random weights from `architecture` and `config`; checkpoint: `path`
    dtype: str = "float32"  # of the weights: float32 or float64; see `check`
    experts: str | None = (
        None  # what runs them: eager, grouped_mm, batched_mm or megablocks; null: the default
    )

    # source=config
    architecture: str = "qwen3_moe"  # transformers' model_type
    config: dict[str, Any] = field(default_factory=dict)  # fields of that architecture's config class
    seed: int = 0  # of the random weights

    # source=checkpoint
    path: str | None = None  # a directory or a hub name; its own tokenizer is used
    trust_remote_code: bool = False

    def check(self) -> None:
        """Raise `ValueError` for options that contradict each other."""
        if self.source not in ("config", "checkpoint"):
            raise ValueError(f"model.source={self.source!r}: expected config or checkpoint")
        if self.dtype == "bfloat16":
            raise ValueError(
                "model.dtype=bfloat16: AdamW's steps at RL learning rates are smaller than the spacing of "
                "bfloat16 weights and would be rounded away; train float32 weights"
            )
        if self.dtype not in ("float32", "float64"):
            raise ValueError(f"model.dtype={self.dtype!r}: expected float32 or float64")
        if self.experts not in (None, *EXPERTS):
            raise ValueError(f"model.experts={self.experts}: expected {', '.join(EXPERTS)} or null")
        if self.source == "checkpoint" and not self.path:
            raise ValueError("model.source=checkpoint needs model.path=DIRECTORY_OR_HUB_NAME")
        if self.source == "config" and self.path:
            raise ValueError(
                f"model.path={self.path} is read by model=checkpoint only: add model=checkpoint, or drop it"
            )
