"""Which trainer makes the updates of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass
class EngineConfig:
    """The options below `name` are those of engine=trl."""

    name: str = "native"  # or trl: see docs/trl.md
    gradient_checkpointing: bool = True
    vllm: bool = False  # responses from TRL's colocated vLLM
    vllm_memory: float = 0.3  # share of a GPU's memory
    vllm_tensor_parallel: int = 1  # GPUs

    def check(self) -> None:
        if self.name not in ("native", "trl"):
            raise ValueError(f"engine.name={self.name!r}: expected native or trl")
        if self.name == "native":
            self._check_native()
        if not 0 < self.vllm_memory < 1 or self.vllm_tensor_parallel < 1:
            raise ValueError(
                f"engine.vllm_memory={self.vllm_memory} must be a share between 0 and 1, "
                f"engine.vllm_tensor_parallel={self.vllm_tensor_parallel} at least 1"
            )

    def _check_native(self) -> None:
        given = [name for name, value in vars(EngineConfig()).items() if getattr(self, name) != value]
        if given:
            option = f"engine.{given[0]}={getattr(self, given[0])}"
            raise ValueError(f"{option}: an option of engine=trl, the native engine has none")
        processes = int(os.environ.get("WORLD_SIZE", 1))
        if processes > 1:
            raise ValueError(f"{processes} processes: the native engine is one process, give engine=trl")
