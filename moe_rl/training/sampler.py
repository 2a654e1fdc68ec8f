"""The sampler of a step: whose weights, in what precision and slices, and whether it records routing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_rl.models import LanguageModel
from moe_rl.routing import RoutingTrace, record_routing
from moe_rl.tasks import Problem
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.prefix import distinct_prompts
from moe_rl.training.rollout import continue_responses, sample_responses
from moe_rl.training.rollout_config import RolloutConfig
from moe_rl.training.turns import spoken_to


@dataclass(frozen=True)
class Sampled:
    """Responses, and the experts [B, T] that the sampler's decoding chose, where they were recorded."""

    batch: RolloutBatch
    trace: RoutingTrace | None = None


@dataclass(frozen=True)
class Sampler:
    """`lm` holds the weights, `version` their number: the steps of training that they have had."""

    lm: LanguageModel
    config: RolloutConfig
    version: int
    record: bool = False
    share_prompts: bool = False

    def start(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Sampled:
        """A response to each prompt, or its first `max_new_tokens`, from torch's current random state."""
        width = max(map(len, prompts))

        def sample(rows: slice) -> RolloutBatch:
            return sample_responses(
                self.lm,
                prompts[rows],
                max_new_tokens=max_new_tokens,
                temperature=self.config.temperature,
                prompt_length=width,
                share_prompts=self.share_prompts,
                version=self.version,
            )

        return self._in_slices(len(prompts), sample, None)

    def answer(self, sampled: Sampled, problems: Sequence[Problem], turn: int) -> Sampled:
        """The next turn, numbered from 0: what the environment says to each row, and the response to it."""
        asked = replace(sampled, batch=spoken_to(self.lm, sampled.batch, problems))
        answered = self.go_on(asked, self.config.max_new_tokens, turn)
        finished_B = sampled.batch.finished_B & answered.batch.finished_B
        return replace(answered, batch=replace(answered.batch, finished_B=finished_B))

    def go_on(self, sampled: Sampled, max_new_tokens: int, turn: int = 0) -> Sampled:
        """Up to `max_new_tokens` more of the responses that have not ended."""

        def more(rows: slice) -> RolloutBatch:
            return continue_responses(
                self.lm,
                sampled.batch[rows],
                max_new_tokens=max_new_tokens,
                temperature=self.config.temperature,
                share_prompts=self.share_prompts,
                version=self.version,
                turn=turn,
            )

        return self._in_slices(len(sampled.batch), more, sampled)

    def _in_slices(
        self, sequences: int, sample: Callable[[slice], RolloutBatch], before: Sampled | None
    ) -> Sampled:
        """`sample` of every micro-batch, joined; with the routing of its decoding and of what was before."""
        size = self.config.microbatch or sequences
        parts, traces = [], []
        for start in range(0, sequences, size):
            rows = slice(start, start + size)
            with record_routing(self.lm.model) if self.record else nullcontext() as recorder:
                part = sample(rows)
            parts.append(part)
            if recorder is not None:
                traces.append(self._trace(recorder.traces(), part, before, rows))
        batch = RolloutBatch.cat(parts, self.lm.pad_id)
        length = batch.input_ids_BT.shape[1]
        return Sampled(batch, RoutingTrace.cat([t.fit(length) for t in traces]) if traces else None)

    def _trace(
        self, decoded: Sequence[RoutingTrace], part: RolloutBatch, before: Sampled | None, rows: slice
    ) -> RoutingTrace:
        """What routed every row when it was first run: `decoded` by this decoding, the rest `before` it."""
        if before is None:
            return whole_trace(decoded, part, version=self.version)
        assert before.trace is not None
        earlier = before.trace[rows].fit(part.input_ids_BT.shape[1])
        if not decoded:  # every response had ended
            later = replace(earlier.where(torch.zeros_like(earlier.valid)), weights_version=self.version)
        else:
            later = whole_trace(decoded, part, version=self.version, rows_B=~before.batch.finished_B[rows])
        return joined_trace(earlier, later)


def whole_trace(
    traces: Sequence[RoutingTrace], batch: RolloutBatch, *, version: int, rows_B: Tensor | None = None
) -> RoutingTrace:
    """What one call of `generate` routed, [B, T]; `rows_B` (bool) are the rows that it had, where not all.

    `traces` are its recordings: one, or that of shared prompts and the one that continued it.
    """
    part = batch if rows_B is None else batch[rows_B.nonzero().flatten()]
    trace = traces[-1]
    if len(traces) == 2:
        once = traces[0]
        rows = distinct_prompts(*part.prompts()).of_row_B
        trace = RoutingTrace.cat([once[rows], trace.columns(once.valid.shape[1])], dim=1)
    trace = trace.fit(part.input_ids_BT.shape[1]).where(part.attention_mask_BT)
    if rows_B is not None:
        nth_B = (rows_B.long().cumsum(0) - 1).clamp_min(0)
        trace = trace[nth_B].where(rows_B[:, None].expand_as(batch.input_ids_BT))
    return replace(trace, weights_version=version)


def joined_trace(earlier: RoutingTrace, later: RoutingTrace) -> RoutingTrace:
    """Row by row the earlier routing where there is one, else the later, with the versions of both."""
    trace = replace(
        later,
        experts=torch.where(earlier.valid[..., None, None], earlier.experts, later.experts),
        valid=earlier.valid | later.valid,
    )
    if earlier.weights_version == later.weights_version:
        return trace
    ours, theirs = (
        torch.full_like(trace.valid, int(version or 0), dtype=torch.int32)
        for version in (earlier.weights_version, later.weights_version)
    )
    versions_BT = torch.where(earlier.valid, ours, theirs).masked_fill(~trace.valid, -1)
    return replace(trace, weights_version=None, row_versions=versions_BT)


def copy_in(lm: LanguageModel, dtype: torch.dtype) -> LanguageModel:
    """The model with its weights rounded to `dtype`, as an inference engine gets them after every update."""
    rounded = copy.deepcopy(lm.model)
    rounded.to(dtype)  # type: ignore[arg-type]  # transformers' wrapper hides nn.Module.to
    return replace(lm, model=rounded)
