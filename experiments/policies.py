"""A policy to look at: a run directory, a checkpoint directory or a hub name."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from moe_rl.models import LanguageModel, ModelConfig, load_model
from moe_rl.store import Run, StoreError
from moe_rl.store.checkpoints import load_checkpoint, step_directories
from moe_rl.tasks import get_task
from moe_rl.training.checkpoint import restore_model

POLICY = "policy."  # in a run's checkpoints, beside a value head


def load_policy(path: str, *, device: str, trust_remote_code: bool = False) -> LanguageModel:
    """The model of `path` with its tokenizer: of a run the final one, or its last checkpoint before that.

    A checkpoint directory (a run's `snapshots/step_N` too) or hub name is loaded as it is. Raises
    `StoreError` for a run without a model yet, `ModelError` for what cannot be loaded.
    """
    folder = Path(path)
    if not (folder / "environment.json").exists():
        config = ModelConfig(
            name="checkpoint", source="checkpoint", path=path, trust_remote_code=trust_remote_code
        )
        return load_model(config, _no_tokenizer, device)
    if (folder / "final").is_dir():
        return load_policy(str(folder / "final"), device=device)
    run, saved = Run(folder), step_directories(folder / "checkpoints")
    if not saved:
        raise StoreError(f"{folder} has neither a final model nor a checkpoint yet")
    tensors = load_checkpoint(saved[-1][1]).model()
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), run.config["model"]))  # type: ignore[assignment]
    config.seed = config.seed or 0  # any: its weights are replaced
    lm = load_model(config, get_task(**run.config["task"]).default_tokenizer, device)
    restore_model(
        lm.model, {name.removeprefix(POLICY): t for name, t in tensors.items() if name.startswith(POLICY)}
    )
    return lm


def _no_tokenizer() -> object:
    raise AssertionError("a checkpoint has a tokenizer of its own")
