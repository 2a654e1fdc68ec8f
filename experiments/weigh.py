"""What a run takes: memory of an update and of sampling, traces, disk; against what there is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from experiments.config import Config
from experiments.findings import Findings, size
from moe_rl.models.footprint import Footprint
from moe_rl.models.memory import Layout, generation_memory, training_memory
from moe_rl.routing.trace_size import TraceSize

GB = 1e9
CHECKPOINTS = 3  # the two that are kept, and the one being written
TRACES = 3  # where drift is measured: of π_old, of this update's policy and of the one before


def weigh(findings: Findings, sizes: Footprint, config: Config, prompt: int, turns: int) -> None:
    """Add memory, traces and disk of a run on a model of these sizes.

    prompt  tokens of the longest prompt, those of all turns together
    """
    hardware, rollout = config.hardware, config.rollout
    responses, response = rollout.prompts * rollout.responses, turns * rollout.longest
    length = prompt + response
    update = -(-responses // (config.optim.minibatches * hardware.gpus))
    micro = min(config.optim.microbatch or update, update)
    findings.add(
        "batch",
        f"{rollout.prompts} prompts x {rollout.responses} responses of {prompt:,} + {response:,} "
        f"tokens at most; {config.optim.minibatches * config.optim.epochs} updates",
    )
    layout, memory = layout_of(config), gpu_memory(config)
    where = "of each GPU" if hardware.gpus > 1 else "of the process"
    findings.add("update", f"memory {where} at its peak, {micro} a forward")
    findings.weigh(
        "memory of an update", training_memory(sizes, layout, micro * length, micro * response), memory
    )
    # vLLM queues what its cache does not hold; the loop's own sampler decodes a micro-batch together
    own = hardware.sampler_tensor_parallel is None
    at_once = min(rollout.microbatch or responses, responses) if own else 1
    parts = generation_memory(sizes, layout, at_once * length, hardware.sampler_tensor_parallel)
    findings.add("sampling", f"memory {where}, {at_once} of full length at once")
    findings.weigh("memory of sampling", parts, memory)
    if "KV cache" not in parts:
        findings.add("  KV cache", "not known for this kind of attention, not counted")
    elif not own:
        room = max(0, memory - sum(parts.values()) + parts["KV cache"]) / parts["KV cache"]
        findings.add("  room for", f"{room:.0f} of full length at once in each copy of the sampler")
    if hardware.gpus > 1:
        findings.add("loading", "host memory, before the weights are sharded")
        copies = {
            f"{hardware.gpus} copies of the weights": hardware.gpus * state_bytes(config) * sizes.parameters
        }
        findings.weigh("loading", copies, host_memory(config))
    if sizes.trace is not None:
        weigh_traces(findings, sizes.trace, config, responses * length)
    weigh_disk(findings, sizes, config)


def weigh_traces(findings: Findings, trace: TraceSize, config: Config, tokens: int) -> None:
    """Traces of a rollout batch, kept on the CPU."""
    in_order, sets = (trace.file_bytes_per_token(ordered) for ordered in (True, False))
    findings.add(
        "trace",
        f"{trace.bytes_per_token:,} B a token; in a file {in_order:,.1f} B in the router's order, "
        f"{sets:,.1f} B as sets",
    )
    findings.add("  in a file", f"{size(in_order * tokens)}, {size(sets * tokens)} as sets")
    held = TRACES if config.drift_every else int(config.replay.source is not None)
    in_memory = {f"{held} in memory": held * trace.bytes_per_token * tokens}
    findings.weigh("traces", in_memory, host_memory(config))


def weigh_disk(findings: Findings, sizes: Footprint, config: Config) -> None:
    """Checkpoints (weights and two moments) and models of the run directory."""
    weights = state_bytes(config) * sizes.parameters
    snapshots = config.steps // config.snapshot_every if config.snapshot_every else 0
    parts = {"checkpoints": CHECKPOINTS * 3 * weights, "final model": weights}
    if snapshots:
        parts["snapshots"] = snapshots * weights
    disk = config.hardware.disk_gb
    findings.add("disk", f"{CHECKPOINTS} checkpoints at once, while one is written; in {config.output}")
    findings.weigh("disk", parts, free_disk(Path(config.output)) if disk is None else disk * GB)


def layout_of(config: Config) -> Layout:
    """One process holds everything; several are TRL's on accelerate: FSDP2, bfloat16, checkpointing."""
    several = config.hardware.gpus > 1
    return Layout(
        gpus=config.hardware.gpus,
        state_bytes=state_bytes(config),
        compute_bytes=2 if several or config.precision == "bfloat16" else state_bytes(config),
        checkpointing=several,
        fused_head=several,
    )


def state_bytes(config: Config) -> int:
    return int(getattr(torch, config.model.dtype).itemsize)


def gpu_memory(config: Config) -> float:
    """Bytes of the memory that a process trains in."""
    if config.hardware.gpu_memory_gb is not None:
        return config.hardware.gpu_memory_gb * GB
    device = torch.device(config.device)
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return physical_memory()


def host_memory(config: Config) -> float:
    host = config.hardware.host_memory_gb
    return physical_memory() if host is None else host * GB


def physical_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def free_disk(path: Path) -> float:
    """Free bytes where `path` is, or will be."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return float(shutil.disk_usage(path).free)
