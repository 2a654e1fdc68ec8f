"""Prompts that neighbouring rows share, packed: one sequence per prompt that holds all of its responses.

G responses to a prompt have the same hidden states, and the same routing, in its columns. A packed row is the
prompt once and then the responses one after the other, each token attending to its prompt and to its own
response alone, at its own position: up to rounding the forward of the whole sequences, on S + G N tokens
instead of G (S + N).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_rl.training.batch import RolloutBatch
from moe_rl.training.prefix import Prompts, distinct_prompts


@dataclass(frozen=True)
class Packing:
    """Where the input columns of a batch [B, T] are in P packed rows of length M.

    source_PM   flat index into [B, T] of each slot, and `real_PM`, False for slots that hold nothing
    place_BT    flat index into [P, M] of each input column. The last column scores nothing and has no slot:
                it points at the one before it.
    """

    source_PM: Tensor
    real_PM: Tensor
    place_BT: Tensor
    prompt_length: int

    def pack(self, values: Tensor) -> Tensor:
        """[B, T, ...] to [P, M, ...]."""
        return values.flatten(0, 1)[self.source_PM]

    def unpack(self, values: Tensor) -> Tensor:
        """[P, M, ...] to [B, T, ...]; gradients of what rows share add up."""
        return values.flatten(0, 1)[self.place_BT]

    def unpack_scoring(self, values: Tensor) -> Tensor:
        """[P, M - S + 1, ...], from the last slot of the prompt on, to the rows that score, [B, N, ...]."""
        S, M = self.prompt_length, self.source_PM.shape[1]
        kept = M - S + 1
        place_BN = self.place_BT[:, S - 1 : -1]
        return values.flatten(0, 1)[place_BN // M * kept + place_BN % M - (S - 1)]

    def attention_mask(self, mask_BT: Tensor, dtype: torch.dtype) -> Tensor:
        """[P, 1, M, M], 0 where a slot may attend and the least number of `dtype` elsewhere.

        A slot attends to itself, to real tokens of its prompt, and to its own response before it. Slots that
        hold nothing attend to themselves, so that nothing in them is NaN.
        """
        P, M = self.source_PM.shape
        S = self.prompt_length
        responses = (M - S) // max(self._tokens, 1)
        part_M = torch.zeros(M, dtype=torch.long, device=mask_BT.device)  # 0 the prompt, j its j-th response
        part_M[S:] = torch.arange(1, responses + 1, device=mask_BT.device).repeat_interleave(self._tokens)
        slots = torch.arange(M, device=mask_BT.device)
        may_MM = (slots[:, None] >= slots) & ((part_M == 0) | (part_M[:, None] == part_M))
        real_PM = self.real_PM & self.pack(mask_BT).bool()
        may_PMM = may_MM & real_PM[:, None, :] | torch.eye(M, dtype=torch.bool, device=mask_BT.device)
        hidden = torch.finfo(dtype).min
        return torch.zeros(P, 1, M, M, dtype=dtype, device=mask_BT.device).masked_fill_(
            ~may_PMM[:, None], hidden
        )

    @property
    def _tokens(self) -> int:
        """Slots of one response."""
        return self.place_BT.shape[1] - 1 - self.prompt_length


def packing_of(batch: RolloutBatch, hidden_size: int) -> Packing | None:
    """How to pack a batch, or None where no prompt is shared or whole sequences are cheaper.

    Cost per layer of T tokens in a row, in multiply-adds: 12 D² T for the weights of a usual layer of width
    D = `hidden_size`, and 2 D T² for attention, which in a packed row is also spent on what is masked.
    """
    S, T = batch.prompt_length, batch.input_ids_BT.shape[1]
    prompts = distinct_prompts(*batch.prompts())
    if not prompts.shared:
        return None
    packing = _pack(prompts, S, T)
    P, M = packing.source_PM.shape

    def cost(rows: int, length: int) -> int:
        return rows * (6 * hidden_size * length + length * length)

    return packing if cost(P, M) < cost(len(batch), T) else None


def _pack(prompts: Prompts, S: int, T: int) -> Packing:
    of_row_B, first_P = prompts.of_row_B, prompts.first_P
    B, P, N = len(of_row_B), len(first_P), T - 1 - S
    device = of_row_B.device
    rows = torch.arange(B, device=device)
    nth_B = rows - first_P[of_row_B]  # which response of its prompt
    M = S + (int(nth_B.max()) + 1) * N
    columns_T = torch.arange(T, device=device).clamp(max=T - 2)
    slot_BT = torch.where(columns_T < S, columns_T, columns_T + nth_B[:, None] * N)
    place_BT = of_row_B[:, None] * M + slot_BT
    real = torch.zeros(P * M, dtype=torch.bool, device=device)
    real[place_BT.flatten()] = True
    source = torch.zeros(P * M, dtype=torch.long, device=device)
    flat_BT = rows[:, None] * T + columns_T
    # a slot that rows share is read from the first of them
    source.scatter_reduce_(0, place_BT.flatten(), flat_BT.flatten(), "amin", include_self=False)
    return Packing(source.view(P, M), real.view(P, M), place_BT, S)
