"""The typed schema behind `conf/measure_noise.yaml`: a training run's, and how its noise is measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from experiments.config import Config, train_config
from moe_rl.laboratory.noise_protocol import NoiseOptions


@dataclass
class NoiseConfig(Config):
    """One measurement of noise."""

    noise: NoiseOptions = field(default_factory=NoiseOptions)


def noise_config(cfg: DictConfig) -> NoiseConfig:
    """The checked options. Raises `ValueError` for those that contradict each other."""
    config = train_config(cfg)
    assert isinstance(config, NoiseConfig)
    config.noise.check(config)
    return config


def register_noise() -> None:
    """Make the schema known to Hydra; safe to call twice."""
    ConfigStore.instance().store(name="schema_noise", node=NoiseConfig)
