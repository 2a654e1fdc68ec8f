"""The record that travels from the rollout to the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from moe_rl.routing import scoring_rows

Result = TypeVar("Result")


def filler(name: str, pad_id: int) -> int:
    """What a field of a batch holds in columns without a token."""
    return {"input_ids_BT": pad_id, "version_BT": -1, "turn_BT": -1}.get(name, 0)


@dataclass(frozen=True)
class RolloutBatch:
    """Prompts (left-padded to one length) and their sampled responses, rows in prompt order.

    With S the padded prompt length and T = S + longest response:

    - `input_ids_BT` int64, `attention_mask_BT` int64 (1 on prompt and response tokens);
    - `response_mask_BT` float32, 1 on response tokens, the stop token included: never before column S;
    - `sampler_logp_BT` float32, log-probability (nats, at the rollout temperature) with which the sampler
      drew the token of that column, 0 outside the response;
    - `finished_B` bool: the response ended in a stop token;
    - `prompt_length`: S;
    - `sampler_entropy_BT` float32, entropy (nats) of the distribution that the token was drawn from;
    - `version_BT` int64, of the weights that drew the token, in steps of training done before, -1 outside
      the response;
    - `turn_BT` int64, the turn that the token belongs to, from 0, -1 outside the response. Between two turns
      are the environment's tokens, which are attended to and are no part of the response.

    The last three are None in a batch that no sampler of this package made.
    """

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    response_mask_BT: Tensor
    sampler_logp_BT: Tensor
    finished_B: Tensor
    prompt_length: int
    sampler_entropy_BT: Tensor | None = None
    version_BT: Tensor | None = None
    turn_BT: Tensor | None = None
    _made: dict[object, object] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return self.input_ids_BT.shape[0]

    def __getitem__(self, rows: slice | Tensor) -> RolloutBatch:
        """The same batch for some sequences; every pass of a step gets the same object for the same slice."""
        if isinstance(rows, slice):
            return self.once(("rows", rows.start, rows.stop, rows.step), lambda: self._of(rows))
        return self._of(rows)

    def _of(self, rows: slice | Tensor) -> RolloutBatch:
        changes: dict[str, Any] = {name: tensor[rows] for name, tensor in self.tensors().items()}
        return replace(self, **changes)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by the name of their field."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def once(self, key: object, make: Callable[[], Result]) -> Result:
        """What follows from the batch alone, made the first time it is asked for."""
        if key not in self._made:
            self._made[key] = make()
        return cast(Result, self._made[key])

    @staticmethod
    def cat(batches: Sequence[RolloutBatch], pad_id: int) -> RolloutBatch:
        """Join batches along B: prompts padded on the left, responses on the right, to the longest."""
        prompt = max(batch.prompt_length for batch in batches)
        response = max(batch.input_ids_BT.shape[1] - batch.prompt_length for batch in batches)

        def padded(batch: RolloutBatch, name: str) -> Tensor:
            tensor: Tensor = batch.tensors()[name]
            if tensor.dim() == 1:
                return tensor
            left = prompt - batch.prompt_length
            right = response - (tensor.shape[1] - batch.prompt_length)
            return nn.functional.pad(tensor, (left, right), value=filler(name, pad_id))

        names = set.intersection(*(set(batch.tensors()) for batch in batches))
        joined: dict[str, Any] = {
            name: torch.cat([padded(batch, name) for batch in batches]) for name in names
        }
        return replace(batches[0], **joined, prompt_length=prompt)

    def longer(self, columns: dict[str, Tensor], pad_id: int) -> RolloutBatch:
        """The same with the columns [B, M] of every field given, and fillers for the others, on the right."""
        M = columns["input_ids_BT"].shape[1]
        found: dict[str, Any] = {}
        for name, tensor in self.tensors().items():
            if tensor.dim() == 2:
                filled = nn.functional.pad(tensor, (0, M), value=filler(name, pad_id))
                filled[:, tensor.shape[1] :] = columns.get(name, filled[:, tensor.shape[1] :])
                found[name] = filled
        return replace(self, **found)

    def ended(self, rows: Tensor) -> RolloutBatch:
        """The same with these rows finished."""
        return replace(self, finished_B=self.finished_B.index_fill(0, rows, True))

    def prompts(self) -> tuple[Tensor, Tensor]:
        """Token ids and attention mask of the prompt columns, [B, S] each."""
        columns = slice(self.prompt_length)
        return self.input_ids_BT[:, columns], self.attention_mask_BT[:, columns]

    @property
    def position_ids_BT(self) -> Tensor:
        """0 on the first real token of a row; padding repeats 0."""
        return (self.attention_mask_BT.cumsum(-1) - 1).clamp_min(0)

    @property
    def routing_rows_BT(self) -> Tensor:
        """bool: the rows whose logits score a response token, prompt_len - 1 … end - 1.

        Routing row t belongs to input position t and its logits score token t + 1, so these are the
        response tokens moved one to the left.
        """
        return scoring_rows(self.response_mask_BT)

    @property
    def response_lengths_B(self) -> Tensor:
        """Tokens in each response, the stop token included."""
        return self.response_mask_BT.sum(-1)

    def responses(self, turn: int | None = None) -> list[list[int]]:
        """Token ids of each response, or of one turn of it, the stop token included."""
        mask = self.response_mask_BT > 0
        if turn is not None and self.turn_BT is not None:
            mask &= self.turn_BT == turn
        return [ids[m].tolist() for ids, m in zip(self.input_ids_BT, mask, strict=True)]
