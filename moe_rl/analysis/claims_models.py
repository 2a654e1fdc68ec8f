"""Statements on other models: dense ones beside the MoE, other numbers and kinds of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moe_rl.analysis.contrasts import apart, cells_of, compared, contrasts
from moe_rl.analysis.evidence import (
    Statement,
    collapses_compared,
    final_reward,
    ids,
    lifetimes,
    mean_of,
    shown_range,
    summary_of,
)
from moe_rl.analysis.run_files import CompactRun

Runs = Sequence[CompactRun]
EXPERTS = "GRPO's instability is that of experts; GSPO's advantage goes with it"
NEEDS_REPLAY = "GRPO on MoE needs Routing Replay to converge"
TOPOLOGY = (
    "model.name",
    "model.config.num_experts",
    "model.config.num_experts_per_tok",
    "optim.aux_loss_coef",
)


def models(suite: str, runs: Runs) -> Iterator[Statement]:
    """GSPO and replay against GRPO on every model, dense ones among them, and the drift of GRPO there."""
    rewards = contrasts(runs, "arm", "grpo", TOPOLOGY, final_reward)
    for arm, claim in (("gspo", EXPERTS), ("grpo+replay", NEEDS_REPLAY)):
        mine = [contrast for contrast in rewards if contrast.value == arm]
        yield from compared(suite, claim, "§5.3", "final reward", "arm", mine)
    for words, group in cells_of([run for run in runs if run.arm == "grpo"], TOPOLOGY).items():
        first = summary_of(group, mean_of("drift/first"))
        lost = sum(run.collapse.step is not None for run in group)
        drift = f"{100 * first.mean:.2g} % of experts changed by a first update" if first.n else "no experts"
        yield Statement(
            "no claim: drift and collapse of GRPO by topology",
            "§5.3",
            suite,
            f"{words}: {drift}, {lost} of {len(group)} collapsed",
            shown_range(100 * first.low, 100 * first.high, first.n) if first.n else "none",
            str(len(group)),
            ids(group),
        )


def against_dense(suite: str, runs: Runs) -> Iterator[Statement]:
    """Whether GSPO's advantage, and GRPO's collapses, are larger on the MoE than on each dense model."""
    found = [c for c in contrasts(runs, "arm", "grpo", ("model.name",), final_reward) if c.value == "gspo"]
    moe = next((contrast for contrast in found if contrast.words == "tiny"), None)
    if moe is None:
        return
    dense = [contrast for contrast in found if contrast is not moe]
    yield from apart(suite, EXPERTS, "§5.3", "final reward", "arm", moe, dense)
    grpo = [[run for run in contrast.runs if run.arm == "grpo"] for contrast in (moe, *dense)]
    lives = [(lifetimes(grpo[0]), lifetimes(group)) for group in grpo[1:]]
    for contrast, group, (one, other), words in zip(
        dense, grpo[1:], lives, collapses_compared(lives), strict=True
    ):
        yield Statement(
            EXPERTS,
            "§5.3",
            suite,
            f"grpo on the MoE and on {contrast.words}: {words}",
            "none",
            f"{one.n} and {other.n}",
            ids(grpo[0], group),
        )
