"""A value estimate on top of a language model's last hidden state, for PPO."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class ValueHead(nn.Module):
    """One linear map D -> 1 in float32; starts at 0, so the first returns are the rewards themselves."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        width = model.get_input_embeddings().get_parameter("weight").shape[1]
        self.linear = nn.Linear(width, 1, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Values [B, T] of hidden states [B, T, D]; the gradient goes on into the model."""
        return self.linear(hidden_BTD.float()).squeeze(-1)
