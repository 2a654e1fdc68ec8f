"""Weights of a transformers checkpoint back into a model that trains, experts included.

transformers saves experts one by one and holds them fused. `from_pretrained` joins them again; the trainer's
own resumption (5.24) does not, and leaves the experts as they were, with a warning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


@torch.no_grad()
def load_saved_weights(model: nn.Module, folder: str | Path, **options: Any) -> None:
    """Copy all weights of a `save_pretrained` folder into `model`, through `from_pretrained`.

    Nothing for a PEFT model, whose checkpoints are adapters alone and are loaded whole. Raises RuntimeError
    where names or shapes differ.
    """
    if not isinstance(model, PreTrainedModel):
        return
    saved = type(model).from_pretrained(folder, dtype=model.dtype, **options)
    model.load_state_dict(saved.state_dict())
