"""The typed schema behind `conf/measure_cost.yaml`: a training run, and how replay's cost is measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from experiments.config import Config, train_config
from moe_rl.training.border import check_one_batch


@dataclass
class CostOptions:
    """What is measured, and how often."""

    lengths: list[int] = field(default_factory=lambda: [16, 64, 256, 1024])  # tokens of every response
    rounds: int = 5  # of a step without, with old-policy and with rollout replay, in turn

    def check(self) -> None:
        if self.rounds < 1 or min(self.lengths, default=0) < 1:
            raise ValueError(
                f"cost.rounds={self.rounds}, cost.lengths={self.lengths}: at least 1, and at least one length"
            )


@dataclass
class CostConfig(Config):
    """One measurement of the cost of replay."""

    cost: CostOptions = field(default_factory=CostOptions)


def cost_config(cfg: DictConfig) -> CostConfig:
    """The checked options. Raises `ValueError` for those that contradict each other."""
    config = train_config(cfg)
    assert isinstance(config, CostConfig)
    config.cost.check()
    check_one_batch(config)
    if config.replay.source is not None:
        raise ValueError(f"replay.source={config.replay.source}: every kind of replay is measured anyway")
    return config


def register_cost() -> None:
    """Make the schema known to Hydra; safe to call twice."""
    ConfigStore.instance().store(name="schema_cost", node=CostConfig)
