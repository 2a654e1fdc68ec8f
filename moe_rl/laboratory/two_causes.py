"""Policy staleness (π_θ against π_old) and engine mismatch (π_old against the sampler μ), kept apart.

log π_θ/μ = log π_θ/π_old + log π_old/μ for every token (MiniRL, arXiv 2512.01374), so the mean square of the
whole is that of staleness, plus that of mismatch, plus twice the mean of their product. Each cause's share is
the mean of its product with the whole over the mean square of the whole; the two shares add up to 1.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from moe_rl.laboratory.change import measure_change
from moe_rl.laboratory.observe import RoutedPass
from moe_rl.laboratory.rows import Row, rows_of
from moe_rl.laboratory.sums import ResponseSums
from moe_rl.routing import RoutingTrace
from moe_rl.training.batch import RolloutBatch


def two_causes(
    new: RoutedPass,
    old: RoutedPass,
    sampler: RoutingTrace,
    batch: RolloutBatch,
    groups_B: Tensor,
    resamples: int,
    subject: str,
) -> Iterator[Row]:
    """Rows of a table of causes: `at` is staleness, mismatch, product or both; over response tokens.

    experts, sets, tokens   changed by each cause, from the traces; `sampler` is what decoding routed
    mean_square             of the log-ratio, nats²; `product` is its cross term, 2·mean(staleness·mismatch)
    share                   of the mean square of log π_θ/μ, a fraction
    """
    named = {"subject": subject, "rows": "response"}
    pairs = {
        "staleness": (old.trace, new.trace),
        "mismatch": (sampler, old.trace),
        "both": (sampler, new.trace),
    }
    for cause, (before, after) in pairs.items():
        table = measure_change(before, after, batch.routing_rows_BT, groups_B)
        for metric in table.metrics:
            sums = table.whole(metric)
            yield from rows_of(sums, resamples, metric=metric, by="cause", at=(cause,), **named)

    mask_BT = batch.response_mask_BT.cpu().double()
    staleness_BT = (new.logp_BT - old.logp_BT).double() * mask_BT
    mismatch_BT = (old.logp_BT.double() - batch.sampler_logp_BT.cpu().double()) * mask_BT
    both_BT = staleness_BT + mismatch_BT
    squares = {
        "staleness": staleness_BT**2,
        "mismatch": mismatch_BT**2,
        "product": 2 * staleness_BT * mismatch_BT,
        "both": both_BT**2,
    }
    for cause, square_BT in squares.items():
        sums = per_response(square_BT, mask_BT, groups_B)
        yield from rows_of(sums, resamples, metric="mean_square", by="cause", at=(cause,), **named)
    for cause, part_BT in (("staleness", staleness_BT), ("mismatch", mismatch_BT)):
        sums = per_response(part_BT * both_BT, both_BT**2, groups_B)
        yield from rows_of(sums, resamples, metric="share", by="cause", at=(cause,), **named)


def per_response(values_BT: Tensor, counts_BT: Tensor, groups_B: Tensor) -> ResponseSums:
    """One column: the sum of values over that of counts, for each response."""
    sums_B1, counts_B1 = (part.double().cpu().sum(1, keepdim=True) for part in (values_BT, counts_BT))
    return ResponseSums(sums_B1, counts_B1, groups_B)
