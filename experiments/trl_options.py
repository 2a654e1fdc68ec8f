"""What engine=trl makes of a run's options: fields of GRPOConfig, or one error for all it cannot honour."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedConfig

from experiments.config import Config
from moe_rl.integrations.losses import OWN_TERMS, require_supported
from moe_rl.objectives import NORMALISATIONS, Objective
from moe_rl.tasks import Task
from moe_rl.training.config import TrainConfig
from moe_rl.training.seeds import derive_seed

# Options of the loop that mean the same under TRL, and those of phases that TRL has no part in. All others
# must be at their defaults, so that an option the loop gets later is refused until it is here.
HONOURED = {
    "steps", "seed", "advantages", "checkpoint_every", "drift_every", "precision",
    "rollout.prompts", "rollout.responses", "rollout.max_new_tokens", "rollout.temperature", "rollout.top_p",
    "rollout.top_k", "rollout.query_set", "rollout.query_set_steps", "rollout.overlong_cache",
    "rollout.grading_timeout",
    "optim.lr", "optim.minibatches", "optim.epochs", "optim.freeze_routers", "optim.warmup_updates",
    "optim.weight_decay", "optim.beta1", "optim.beta2", "optim.max_grad_norm", "optim.microbatch",
    "replay.source",
}  # fmt: skip
OTHER_PHASES = ("cold_start.", "evaluation.", "collapse.")


def require_honoured(config: Config, objective: Objective, task: Task, processes: int) -> None:
    """Raise `ValueError`, one for all reasons, where TRL would train something else than was asked for."""
    defaults, given = (flat(asdict(options)) for options in (TrainConfig(), config))
    reasons = [
        f"{name}={given[name]!r}"
        for name, default in defaults.items()
        if given[name] != default and name not in HONOURED and not name.startswith(OTHER_PHASES)
    ]
    if config.advantages not in NORMALISATIONS:
        reasons.append(f"advantages={config.advantages!r}")
    if len(task.train(0).turns) > 1:
        reasons.append("a task of several turns")
    rows = config.rollout.prompts * config.rollout.responses // config.optim.minibatches
    size = (config.optim.microbatch or 1) * processes
    if rows % size:
        reasons.append(
            f"mini-batches of {rows} responses in micro-batches of {config.optim.microbatch or 'equal size'} "
            f"on {processes} processes (they must divide evenly)"
        )
    if config.rollout.prompts % processes:
        reasons.append(
            f"rollout.prompts={config.rollout.prompts} on {processes} processes (whole groups on each)"
        )
    try:
        require_supported(objective, loss_options(config, objective))
    except ValueError as error:
        reasons.append(str(error))
    if reasons:
        raise ValueError(f"engine=trl cannot honour {'; '.join(reasons)}: use engine=native, or leave it out")


def require_no_noise(config: PreTrainedConfig) -> None:
    """Raise `ValueError` for a model with dropout or jitter: TRL trains in training mode, the loop does not.

    Under it π_old and the policy in training would differ, in their experts too, without any update.
    """
    noise = {
        name: value
        for name, value in config.get_text_config().to_dict().items()
        if ("dropout" in name or "pdrop" in name or "jitter" in name) and isinstance(value, float) and value
    }
    if noise:
        given = ", ".join(f"{name}={value}" for name, value in noise.items())
        raise ValueError(
            f"engine=trl cannot honour the model's {given}: TRL trains in training mode, where routing and "
            "ratios would be noisy; set them to 0 in its config.json, or use engine=native"
        )


def flat(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def loss_options(config: Config, objective: Objective) -> SimpleNamespace:
    """The fields of GRPOConfig that `require_supported` looks at."""
    own = OWN_TERMS | {"beta": objective.kl_coef, "use_vllm": config.engine.vllm}
    return SimpleNamespace(vllm_importance_sampling_correction=False, **own)


def grpo_settings(
    config: Config, objective: Objective, output: str, done: int, processes: int
) -> dict[str, Any]:
    """The fields of GRPOConfig for the steps after `done`: an optimiser step of TRL is a gradient update."""
    rollout, optim, engine = config.rollout, config.optim, config.engine
    rows = rollout.prompts * rollout.responses // optim.minibatches // processes  # of a mini-batch
    microbatch = optim.microbatch or rows
    accumulated = rows // microbatch
    settings: dict[str, Any] = {
        "output_dir": output,
        "seed": derive_seed(config.seed, "trl") % 2**31,
        # the rollout: P prompts, G responses, N mini-batches, epochs
        "per_device_train_batch_size": microbatch,
        "gradient_accumulation_steps": accumulated,
        "steps_per_generation": optim.minibatches * accumulated,
        "num_generations": rollout.responses,
        "num_iterations": optim.epochs,
        "max_steps": (config.steps - done) * optim.minibatches * optim.epochs,
        "shuffle_dataset": False,
        # sampling: what the ratio's log-probabilities are of
        "max_completion_length": rollout.max_new_tokens,
        "temperature": rollout.temperature,
        "top_p": 1.0,
        "top_k": 0,
        # AdamW; the schedule is the trainer's own
        "optim": "adamw_torch_fused",
        "learning_rate": optim.lr,
        "adam_beta1": optim.beta1,
        "adam_beta2": optim.beta2,
        "weight_decay": optim.weight_decay,
        "max_grad_norm": optim.max_grad_norm,
        "beta": objective.kl_coef,
        "router_aux_loss_coef": 0.0,
        # this machine
        "use_cpu": config.device == "cpu",
        "bf16": config.precision == "bfloat16",
        "gradient_checkpointing": engine.gradient_checkpointing,
        "dataloader_pin_memory": config.device != "cpu",
        # checkpoints, records and progress are the run store's
        "save_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "report_to": [],
        "disable_tqdm": True,
    }
    if engine.vllm:
        settings |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": engine.vllm_memory,
            "vllm_tensor_parallel_size": engine.vllm_tensor_parallel,
            "vllm_importance_sampling_correction": False,
        }
    return settings
