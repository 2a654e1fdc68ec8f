"""What replay puts in place of a router's selection: rows of a trace, looked up by layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_rl.routing.gates import Scores
from moe_rl.routing.trace import RoutingTrace
from moe_rl.routing.variants import OldWeights, Threshold, Variant


class TraceRows:
    """The rows of a trace on one device, flat as routers see them: N = B T, one [N, K] per layer."""

    def __init__(
        self, trace: RoutingTrace, variant: Variant | None, keep_native: bool, device: torch.device
    ) -> None:
        moved = trace.to(device)
        self.experts_LNK = moved.experts.flatten(0, 1).transpose(0, 1).contiguous()
        self.valid_N1 = moved.valid.reshape(-1, 1)
        self.threshold = variant if isinstance(variant, Threshold) else None
        self.weights_LNK = None
        if isinstance(variant, OldWeights):
            weights_NLK = variant.weights_BTLK.to(device).flatten(0, 1)
            self.weights_LNK = weights_NLK.transpose(0, 1).contiguous()
        self.own_rows = None if keep_native else (~moved.valid.flatten()).nonzero().squeeze(1)


class LayerForce:
    """The `Force` of one router call: one layer of a trace."""

    def __init__(
        self,
        rows_on: Callable[[torch.device], TraceRows],
        layer: int,
        reweighs: bool,
        check_rows: Callable[[int], None],
    ) -> None:
        self._rows_on, self._layer, self.reweighs = rows_on, layer, reweighs
        self._check_rows = check_rows

    def own_rows(self, num_rows: int, device: torch.device) -> Tensor | None:
        self._check_rows(num_rows)
        return self._rows_on(device).own_rows

    def experts(self, native_NK: Tensor, scores: Scores | None) -> Tensor:
        rows = self._rows_on(native_NK.device)
        forced_NK = rows.experts_LNK[self._layer].to(native_NK.dtype)
        if rows.own_rows is not None:
            return forced_NK.index_copy(0, rows.own_rows, native_NK) if len(rows.own_rows) else forced_NK
        # Rows that are not valid hold ids that nobody checked, and none of them may be looked up.
        forced_NK = torch.where(rows.valid_N1, forced_NK, native_NK)
        if rows.threshold is None or scores is None:
            return forced_NK
        return rows.threshold.choose(forced_NK, native_NK, scores)

    def weights(self, current_NK: Tensor) -> Tensor:
        rows = self._rows_on(current_NK.device)
        assert rows.weights_LNK is not None
        return torch.where(rows.valid_N1, rows.weights_LNK[self._layer].to(current_NK.dtype), current_NK)
