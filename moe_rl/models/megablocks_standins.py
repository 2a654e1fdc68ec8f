"""PyTorch in place of what MegaBlocks 0.10.0 compiles, so that its layers run where that cannot be built.

MegaBlocks calls two CUDA extensions at import time and four Triton kernels on its activations. The extensions
do not compile against current CUDA and torch, and none of the three runs on a CPU. The stand-ins take the
arguments of the originals (csrc/*.h, megablocks/backend/kernels.py, grouped_gemm/ops.py), compute the same
numbers and, like the kernels, scale and multiply in float32. What only the sparse layers need is left out:
MegaBlocks itself refuses those with triton 3.2 and newer.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EXTENSIONS = ("megablocks_ops", "grouped_gemm")


def add_missing_extensions() -> None:
    """Make the extensions that are not installed importable; call before the first import of megablocks."""
    for name in EXTENSIONS:
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            sys.modules[name] = _extension(name)


def extensions_in_torch() -> tuple[str, ...]:
    """The extensions that a stand-in replaces in this process."""
    return tuple(name for name in EXTENSIONS if getattr(sys.modules.get(name), "__moe_rl__", False))


def cover_cpu(kernels: Any) -> None:
    """Let the Triton kernels of `megablocks.backend.kernels` take CPU tensors; others go to the kernels."""
    for name, in_torch in _KERNELS.items():
        setattr(kernels, name, _Kernel(getattr(kernels, name), in_torch))


def _extension(name: str) -> ModuleType:
    module: Any = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__moe_rl__ = True
    if name == "megablocks_ops":
        module.sort, module.histogram = _sort, _histogram
        module.inclusive_cumsum, module.exclusive_cumsum = _inclusive_cumsum, _exclusive_cumsum
    else:
        module.backend = SimpleNamespace(gmm=_gmm)
        module.ops = SimpleNamespace(gmm=_differentiable_gmm)
    return module


# megablocks_ops: results go into tensors that the caller allocated


def _sort(x: Tensor, end_bit: int, x_out: Tensor, iota_out: Tensor) -> None:
    sorted_x, order = x.sort(stable=True)  # stable, as the radix sort is; end_bit only spares it passes
    x_out.copy_(sorted_x)
    iota_out.copy_(order)


def _histogram(x: Tensor, num_bins: int) -> Tensor:
    return torch.bincount(x, minlength=num_bins).int()


def _inclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> None:
    out.copy_(x.cumsum(dim))


def _exclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> None:
    out.copy_(x.cumsum(dim) - x)


# grouped_gemm


def _gmm(
    a: Tensor,
    b: Tensor,
    batch_sizes: Tensor,
    trans_a: bool = False,
    trans_b: bool = False,
    c: Tensor | None = None,
) -> Tensor:
    """Groups of `batch_sizes` rows of `a`, each times its matrix in `b`; with `trans_a`, a_eᵀ b_e of each."""
    ends = batch_sizes.cumsum(0).to(a.device, torch.int32)
    out = F.grouped_mm(a.t() if trans_a else a, b.transpose(1, 2) if trans_b else b, offs=ends)
    return out if c is None else c.copy_(out)


class _GroupedMatmul(torch.autograd.Function):
    """`F.grouped_mm` refuses the broadcast gradients that `sum` sends; like grouped_gemm, make them dense."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool) -> Tensor:
        ctx.save_for_backward(a, b, batch_sizes)
        ctx.trans_b = trans_b
        return _gmm(a, b, batch_sizes, trans_b=trans_b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, b, batch_sizes = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = _gmm(grad, b, batch_sizes, trans_b=not ctx.trans_b)
        if ctx.needs_input_grad[1]:
            left, right = (grad, a) if ctx.trans_b else (a, grad)
            grad_b = _gmm(left, right, batch_sizes, trans_a=True)
        return grad_a, grad_b, None, None


def _differentiable_gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    return _GroupedMatmul.apply(a, b, batch_sizes, trans_b)


# The Triton kernels. `a` has a row per token (or, with A_TO_B false, per token and choice), `b` a row per
# choice, ordered by expert; `indices` says which choice, `bins` where the choices of every expert end.


class _Kernel:
    """Launches `in_torch` on CPU tensors and the Triton kernel on all others."""

    def __init__(self, kernel: Any, in_torch: Callable[..., None]) -> None:
        self._kernel, self._in_torch = kernel, in_torch

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **constants: Any) -> Any:
            return (self._in_torch if args[0].is_cpu else self._kernel[grid])(*args, **constants)

        return launch


def _padded_copy(
    a: Tensor, b: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor,
    padded_bins: Tensor, *, NUM_COLUMNS: int, TOP_K: int, A_TO_B: bool, SCALE: bool,
) -> None:  # fmt: skip
    rows = _rows_in_bins(bin_ids, bins, _starts(padded_bins))
    _copy(a, b, indices, rows, weights, NUM_COLUMNS, TOP_K, A_TO_B)


def _padded_copy_wgrad(
    x: Tensor, grad: Tensor, wgrad: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor,
    padded_bins: Tensor, *, NUM_COLUMNS: int, TOP_K: int,
) -> None:  # fmt: skip
    rows = _rows_in_bins(bin_ids, bins, _starts(padded_bins))
    _weight_gradient(x, grad, wgrad, indices, rows, NUM_COLUMNS, TOP_K)


def _binned_copy(
    a: Tensor, b: Tensor, num_experts: int, expert_capacity: int, indices: Tensor, weights: Tensor | None,
    bins: Tensor, *, NUM_COLUMNS: int, TOP_K: int, A_TO_B: bool, SCALE: bool,
) -> None:  # fmt: skip
    kept, rows = _rows_within_capacity(bins, expert_capacity)
    _copy(a, b, indices[kept], rows, weights, NUM_COLUMNS, TOP_K, A_TO_B)


def _binned_copy_wgrad(
    x: Tensor, grad: Tensor, wgrad: Tensor, num_experts: int, expert_capacity: int, indices: Tensor,
    bins: Tensor, *, NUM_COLUMNS: int, TOP_K: int,
) -> None:  # fmt: skip
    kept, rows = _rows_within_capacity(bins, expert_capacity)
    _weight_gradient(x, grad, wgrad, indices[kept], rows, NUM_COLUMNS, TOP_K)


_KERNELS: dict[str, Callable[..., None]] = {
    "_padded_copy": _padded_copy,
    "_padded_copy_wgrad": _padded_copy_wgrad,
    "_binned_copy": _binned_copy,
    "_binned_copy_wgrad": _binned_copy_wgrad,
}


def _starts(ends: Tensor) -> Tensor:
    return F.pad(ends, (1, 0))[:-1]


def _rows_in_bins(bin_ids: Tensor, bins: Tensor, starts_in_b: Tensor) -> Tensor:
    """Row of `b` of every choice: its place in its bin, from where the bin starts there."""
    place = torch.arange(len(bin_ids), device=bins.device) - _starts(bins)[bin_ids]
    return place + starts_in_b[bin_ids]


def _rows_within_capacity(bins: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Which of the ordered choices fit into their expert's `capacity` rows, and the rows of those."""
    experts = torch.arange(len(bins), device=bins.device)
    bin_ids = experts.repeat_interleave(bins - _starts(bins))
    rows = _rows_in_bins(bin_ids, bins, experts * capacity)
    kept = rows < (bin_ids + 1) * capacity
    return kept, rows[kept]


def _copy(
    a: Tensor, b: Tensor, indices: Tensor, rows: Tensor, weights: Tensor | None, width: int, top_k: int,
    a_to_b: bool,
) -> None:  # fmt: skip
    a, b = a.view(-1, width), b.view(-1, width)
    scale = 1.0 if weights is None else weights[indices].float()[:, None]
    if a_to_b:
        b[rows] = (a[indices // top_k].float() * scale).to(b.dtype)
    else:
        a[indices] = (b[rows].float() * scale).to(a.dtype)


def _weight_gradient(
    x: Tensor, grad: Tensor, wgrad: Tensor, indices: Tensor, rows: Tensor, width: int, top_k: int
) -> None:
    products = x.view(-1, width)[rows].float() * grad[indices // top_k].float()
    wgrad[indices] = products.sum(-1).to(wgrad.dtype)
