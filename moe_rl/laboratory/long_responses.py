"""Responses of thousands of tokens from a model that learnt short answers: problem after problem.

Left to go on after its answer, a small model repeats itself, where no update changes anything and log-ratios
vanish. So a long response is made of rounds: the environment poses the next problem, the policy answers it in
as many tokens as the right answer has. Only the policy's own tokens are the response (as in multi-turn RL)
and make its length. For rounds far on to be like the first, the cold start has several in one context
(`InRounds`), and the model a sliding window: then what it sees is what it was trained on, at any length.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe_rl.models import LanguageModel
from moe_rl.tasks import Problem, Task
from moe_rl.tasks.encode import answer_ids, prompt_ids, said_ids
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.prefix import cache_of

CHUNK = 512  # tokens a forward: attention then needs heads x CHUNK x length numbers at most


@dataclass(frozen=True)
class InRounds:
    """A task whose cold-start examples are `rounds` problems in one context; the others stay one by one."""

    task: Task
    rounds: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def warmup(self, index: int) -> Problem:
        first, *later = (self.task.warmup(index * self.rounds + number) for number in range(self.rounds))
        return replace(first, later=tuple(later))


def posed_rounds(
    lm: LanguageModel, task: Task, responses: int, length: int, seed: int = 0
) -> tuple[list[Tensor], int]:
    """The ids [B, S] that the environment says in each round, and the tokens A of every answer.

    As many rounds as make `length` response tokens, of held-out problems, each seed's its own. Raises
    ValueError where prompts or answers differ in length, and where the model has not the positions for them,
    or the problems have turns already.
    """
    if task.test(0).later:
        raise ValueError(
            "long responses are made of rounds of one problem each: a task of several turns has none"
        )
    answer = len(answer_ids(lm.tokenizer, task.test(0)))
    rounds, lengths, posed = -(-length // answer), {answer}, []
    for index in range(rounds):
        problems = [task.test((seed * responses + row) * rounds + index) for row in range(responses)]
        encode = said_ids if index else prompt_ids
        posed.append([encode(lm.tokenizer, problem) for problem in problems])
        lengths |= {len(answer_ids(lm.tokenizer, problem)) for problem in problems}
    widths = {len(ids) for ids in posed[0]}, {len(ids) for of_round in posed[1:] for ids in of_round}
    if len(lengths) > 1 or any(len(found) > 1 for found in widths):
        raise ValueError(
            "long responses are measured side by side: prompts, and answers, must all have one length; with "
            "the generated tasks set task.min_length = task.max_length"
        )
    total = sum(len(of_round[0]) + answer for of_round in posed)
    limit = getattr(lm.model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and total > limit:
        raise ValueError(
            f"responses of {length} tokens with their problems are {total} tokens, more than the model's "
            f"max_position_embeddings={limit}: raise it, or lower noise.lengths"
        )
    device = lm.model.device
    return [torch.tensor(of_round, device=device) for of_round in posed], answer


@torch.no_grad()
def sample_long(model: PreTrainedModel, posed: list[Tensor], answer: int, temperature: float) -> RolloutBatch:
    """Answers of `answer` tokens to every round, from torch's current random state; stop tokens stop nothing.

    The response mask is 1 on the drawn tokens, whose log-probabilities are those they were drawn with,
    decoded on a key-value cache. Prompt is the first round's problem.
    """
    ids, logp, mask = [], [], []
    decode = _Cached(model)
    pending_BN = posed[0][:, :0]
    for said_BS in posed:
        pending_BN = torch.cat([pending_BN, said_BS], dim=1)
        ids.append(said_BS)
        logp.append(torch.zeros(said_BS.shape, device=said_BS.device))
        mask.append(torch.zeros_like(logp[-1]))
        for _ in range(answer):
            logits_BV = decode(pending_BN, logits_to_keep=1)[:, -1]
            logp_BV = torch.log_softmax(logits_BV.float() / temperature, dim=-1)
            pending_BN = torch.multinomial(logp_BV.exp(), 1)
            ids.append(pending_BN)
            logp.append(logp_BV.gather(-1, pending_BN))
            mask.append(torch.ones_like(logp[-1]))
    ids_BT = torch.cat(ids, dim=1)
    return RolloutBatch(
        input_ids_BT=ids_BT,
        attention_mask_BT=torch.ones_like(ids_BT),
        response_mask_BT=torch.cat(mask, dim=1),
        sampler_logp_BT=torch.cat(logp, dim=1),
        finished_B=torch.zeros(len(ids_BT), dtype=torch.bool, device=ids_BT.device),
        prompt_length=posed[0].shape[1],
    )


@torch.no_grad()
def chunked_logp(
    model: PreTrainedModel, batch: RolloutBatch, temperature: float, chunk: int = CHUNK
) -> Tensor:
    """log π [B, T] of unpadded sequences, in nats on the CPU, up to rounding what `score` gives.

    Column t is token t's; 0 in column 0, which nothing predicts. Memory is bounded by the cache and one chunk
    of one sequence: rows run one after the other.
    """
    return torch.cat(
        [
            torch.cat(list(_row_logp(model, row_1T, temperature, chunk)), dim=1)
            for row_1T in batch.input_ids_BT.split(1)
        ]
    )


def _row_logp(model: PreTrainedModel, ids_1T: Tensor, temperature: float, chunk: int) -> Iterator[Tensor]:
    yield torch.zeros(1, 1)
    decode, T = _Cached(model), ids_1T.shape[1]
    for start in range(0, T - 1, chunk):
        stop = min(start + chunk, T - 1)
        logp_1NV = torch.log_softmax(decode(ids_1T[:, start:stop]).float() / temperature, dim=-1)
        yield logp_1NV.gather(-1, ids_1T[:, start + 1 : stop + 1, None]).squeeze(-1).cpu()


class _Cached:
    """A model that is called with the next tokens of unpadded sequences, and keeps their cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # transformers is renaming the argument, and the field of the output
        new = "cache" in inspect.signature(type(model).forward).parameters
        self._name = "cache" if new else "past_key_values"
        self._held: dict[str, Any] = {}

    def __call__(self, ids_BN: Tensor, **options: Any) -> Tensor:
        output = self._model(input_ids=ids_BN, use_cache=True, **self._held, **options)
        self._held = {self._name: cache_of(output)}
        logits: Tensor = output.logits
        return logits
