"""Statements on early warning, from the runs of all suites together, and their figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd
from matplotlib.figure import Figure

from moe_rl.analysis.early_warning import FALSE_ALARMS, HORIZON, EarlyWarning, all_signals, median, watchable
from moe_rl.analysis.evidence import Statement, ids, shown_range
from moe_rl.analysis.plots import Panel, dress
from moe_rl.analysis.run_files import CompactRun
from moe_rl.analysis.statistics import Proportion

Runs = Sequence[CompactRun]
SUITE = "early_warning"
QUESTION = "no claim: which signal warns before a collapse"


def warning_statements(runs: Runs) -> Iterator[Statement]:
    """One statement a signal; one in all where no run collapsed."""
    kept = watchable(runs)
    if not kept:
        return
    collapsed = sum(run.collapse.step is not None for run in kept)
    if not collapsed:
        words = f"none of {len(kept)} runs collapsed: there was nothing to warn of"
        yield Statement(QUESTION, "§3", SUITE, words, "none", f"{len(kept)} runs", ids(kept))
        return
    for found in all_signals(kept):
        yield Statement(
            QUESTION, "§3", SUITE, in_words(found), _intervals(found),
            f"{found.collapses} collapses, {found.false_alarms.n} runs without", ids(kept),
        )  # fmt: skip


def in_words(found: EarlyWarning) -> str:
    """What a signal gave, with all that limits it."""
    if not found.collapses and not found.false_alarms.n:
        return f"{found.signal}: no threshold, for want of runs of other seeds without a collapse ahead"
    said = (
        f"{found.signal}: warned of {found.warned.hits} of {found.warned.n} collapses before the decline, of "
        "those that it could have warned of"
    )
    if found.lead:
        lead, rule = median(found.lead), median(found.lead_rule)
        said += f", median lead {lead.value:g} steps to the decline and {rule.value:g} to the rule's step"
    said += (
        f"; alarm in {found.false_alarms.hits} of {found.false_alarms.n} runs without a collapse "
        f"(threshold from other seeds at {100 * FALSE_ALARMS:g} %)"
    )
    if found.calm_steps == found.calm_steps:
        said += f" and on {100 * found.calm_steps:.2g} % of steps more than {HORIZON} before a decline"
    for count, what in (
        (found.late, "alarms with or after the decline"),
        (found.early, f"alarms more than {HORIZON} steps ahead, counted as false"),
        (found.too_soon, "collapses declined before the signal was first judged"),
        (found.unjudged, "runs without a threshold"),
    ):
        said += f"; {count} {what}" if count else ""
    return said


def _intervals(found: EarlyWarning) -> str:
    lead = median(found.lead)
    return (
        f"warned {_exact(found.warned)}; lead {shown_range(lead.low, lead.high, lead.n)}; "
        f"false alarms {_exact(found.false_alarms)}"
    )


def _exact(share: Proportion) -> str:
    return f"95 % exact: {share.low:.2g} to {share.high:.2g}" if share.n else "none"


def warning_figure(runs: Runs) -> Figure | None:
    """Lead, collapses warned of and false alarms by signal; None where no collapse was judged."""
    signals = [found for found in all_signals(runs) if found.collapses]
    if not signals:
        return None
    figure = Figure(figsize=(11.0, 1.6 + 0.42 * len(signals)))
    left, middle, right = figure.subplots(1, 3, sharey=True, width_ratios=(1.4, 1, 1))
    dress(left, Panel("steps from alarm to decline, median", "", pd.DataFrame(), xlabel="steps"))
    dress(middle, Panel("collapses warned of", "", pd.DataFrame(), xlabel="share"))
    dress(right, Panel("false alarms", "", pd.DataFrame(), xlabel="share of runs without a collapse"))
    for place, found in enumerate(signals):
        lead = median(found.lead)
        left.plot(found.lead, [place + 0.16] * lead.n, "|", color="#888888", markersize=6)
        for ax, value, low, high in (
            (left, lead.value, lead.low, lead.high),
            *(
                (ax, share.hits / max(share.n, 1), share.low, share.high)
                for ax, share in ((middle, found.warned), (right, found.false_alarms))
                if share.n
            ),
        ):
            ax.plot([low, high], [place, place], color="#0072B2", linewidth=2)
            ax.plot([value], [place], "o", color="#0072B2", markersize=5)
    left.axvline(0, color="#888888", linewidth=0.8)
    right.axvline(FALSE_ALARMS, color="#888888", linewidth=0.8, linestyle=":")
    for ax in (middle, right):
        ax.set_xlim(-0.03, 1.03)
    labels = [
        f"{found.signal} ({len(found.lead)} alarms; could warn of {found.warned.n} of {found.collapses})"
        for found in signals
    ]
    left.set_yticks(range(len(signals)), labels, fontsize=8)
    left.invert_yaxis()
    figure.tight_layout()
    return figure
