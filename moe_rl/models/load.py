"""From a `ModelConfig` to a model with its tokenizer, checked to be trainable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from moe_rl.models.config import ModelConfig, ModelError
from moe_rl.models.experts import set_experts
from moe_rl.models.gguf import CACHE, checkpoint_directory
from moe_rl.models.upcycle import upcycle
from moe_rl.routing.routers import find_routers, has_routers, router_gets_gradient

# Read by modeling code, and present in published config.json files, without being declared on the class.
UNDECLARED_FIELDS = {"head_dim"}


@dataclass(frozen=True)
class LanguageModel:
    """A causal LM and the tokenizer it was made for.

    `stop_ids`: token ids that end a response (the tokenizer's EOS and the checkpoint's others).
    `pad_id`: fills batches; never attended to.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    pad_id: int

    def save(self, path: str | Path) -> None:
        """Write a directory that `from_pretrained` and `model=checkpoint` read."""
        self.model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)


def load_model(
    config: ModelConfig,
    default_tokenizer: Callable[[], PreTrainedTokenizerBase],
    device: str = "cpu",
    cache: Path = CACHE,
) -> LanguageModel:
    """Build or load the model; `default_tokenizer` makes the tokenizer of a model built from a config, and
    `cache` holds the weights of a GGUF file in a form that loads fast.

    Raises `ModelError` for a config field that the architecture does not have, a checkpoint that cannot be
    loaded or upcycled, a vocabulary smaller than the tokenizer's, a router that no gradient can reach, and
    experts that a configured implementation cannot run; `ModuleNotFoundError` for one that is not installed.
    """
    config.check()
    dtype = getattr(torch, config.dtype)
    if config.source != "config":
        path = checkpoint_directory(str(config.path), cache)
        model, tokenizer = _from_checkpoint(path, dtype, config.trust_remote_code)
        if config.upcycle is not None:
            model = upcycle(model, config.upcycle, config.own_seed)
    else:
        tokenizer = default_tokenizer()
        model = _from_config(config, tokenizer, dtype)
    if config.experts is not None:
        set_experts(model, config.experts)
    model.to(torch.device(device))  # type: ignore[arg-type]  # transformers' wrapper hides nn.Module.to
    return prepare(model, tokenizer)


def prepare(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> LanguageModel:
    """Check that model and tokenizer fit and can be trained, and find out how responses end."""
    vocabulary = model.get_input_embeddings().get_parameter("weight").shape[0]
    if len(tokenizer) > vocabulary:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {vocabulary} rows: "
            "they do not belong together; give the checkpoint its own tokenizer"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(
            "the tokenizer has no EOS token, so responses could not end: set eos_token in the checkpoint's "
            "tokenizer_config.json"
        )
    check_trainable(model)

    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    stops = {int(tokenizer.eos_token_id), *([eos] if isinstance(eos, int) else eos or [])}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    # Sampling defaults that a checkpoint ships (top-p, penalties) would silently change the sampler.
    model.generation_config = GenerationConfig(eos_token_id=sorted(stops), pad_token_id=pad)
    return LanguageModel(model, tokenizer, tuple(sorted(stops)), int(pad))


def check_trainable(model: PreTrainedModel) -> None:
    """Raise `ModelError` when a router's weights cannot receive a gradient; dense models pass."""
    if not has_routers(model):
        return
    for router in find_routers(model):
        if not router_gets_gradient(router):
            raise ModelError(
                f"{router.name} routes to its top-{router.top_k} expert with weights normalised over the "
                "selected: that weight is always 1, so the router would never receive a gradient and its "
                "drift would mean nothing; use top-2 or more, or norm_topk_prob=false"
            )


def architecture_config(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The transformers config of a model with source=config, its vocabulary that of `tokenizer`.

    Raises `ModelError` for an unknown architecture, a field that it does not have and an impossible value.
    """
    hf_config = _default_config(config.architecture)
    unknown = sorted(k for k in config.config if not hasattr(hf_config, k) and k not in UNDECLARED_FIELDS)
    if unknown:
        raise ModelError(
            f"model.config.{unknown[0]}: {type(hf_config).__name__} has no such field; its fields: "
            + ", ".join(sorted(hf_config.to_dict()))
        )
    special = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    try:
        return type(hf_config)(**special | dict(config.config))
    except (ValueError, TypeError) as error:
        raise ModelError(f"model={config.name} cannot be built: {error}") from error


def _from_config(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype
) -> PreTrainedModel:
    full = architecture_config(config, tokenizer)
    seed = config.own_seed
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(full, dtype=dtype)
    except (ValueError, TypeError) as error:
        raise ModelError(f"model={config.name} cannot be built: {error}") from error


def _default_config(architecture: str) -> PreTrainedConfig:
    try:
        return AutoConfig.for_model(architecture)
    except (ValueError, KeyError) as error:
        raise ModelError(
            f"model.architecture={architecture!r}: transformers has no such model_type (e.g. qwen3_moe)"
        ) from error


def _from_checkpoint(
    path: str, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if path.startswith((".", "/", "~")) and not Path(path).expanduser().is_dir():
        raise ModelError(f"model.path={path}: there is no such directory")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, trust_remote_code=trust_remote_code, use_safetensors=True
        )
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        if "trust_remote_code" in str(error):
            reason = "it brings code of its own, which runs only with model.trust_remote_code=true"
        raise ModelError(
            f"model.path={path} cannot be loaded as a causal LM with its tokenizer: {reason}"
        ) from error
    return model, tokenizer
