"""What a run takes: memory of an update and of sampling, traces, disk; against what there is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from experiments.config import Config
from experiments.findings import Findings, size
from moe_rl.models.footprint import Footprint
from moe_rl.models.memory import (
    Layout,
    resting_memory,
    sampler_memory,
    sampling_memory,
    training_memory,
)
from moe_rl.routing.trace_size import TraceSize

GB = 1e9
CHECKPOINTS = 3  # the two that are kept, and the one being written
TRACES = 3  # where drift is measured: of π_old, of this update's policy and of the one before


def weigh(
    findings: Findings,
    sizes: Footprint,
    config: Config,
    prompt: int,
    turns: int,
    *,
    awake: bool,
    reference: bool,
) -> None:
    """Add memory, traces and disk of a run on a model of these sizes.

    prompt     tokens of the longest prompt, those of all turns together
    awake      whether vLLM, where it samples, keeps its memory during updates
    reference  whether a reference policy is held
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
    layout, memory = layout_of(config, reference), gpu_memory(config)
    where = "of each GPU" if hardware.gpus > 1 else "of the process"
    findings.add("update", f"memory {where} at its peak, {micro} a forward")
    parts = training_memory(sizes, layout, micro * length, micro * response)
    if config.engine.vllm and awake:
        parts["vLLM"] = int(config.engine.vllm_memory * memory)
    findings.weigh("memory of an update", parts, memory)
    if config.engine.vllm:
        weigh_vllm(findings, sizes, config, layout, length)
    else:
        at_once = -(-min(rollout.microbatch or responses, responses) // hardware.gpus)
        findings.add("sampling", f"memory {where}, {at_once} of full length at once")
        findings.weigh("memory of sampling", sampling_memory(sizes, layout, at_once * length), memory)
        if sizes.kv_per_token is None:
            findings.add("  KV cache", "not known for this kind of attention, not counted")
    weigh_evaluation(findings, sizes, config, layout, length)
    if hardware.gpus > 1:
        weigh_loading(findings, config, state_bytes(config) * sizes.parameters)
    if sizes.trace is not None:
        weigh_traces(findings, sizes.trace, config, responses * length)
    weigh_disk(findings, sizes, config)


def weigh_vllm(findings: Findings, sizes: Footprint, config: Config, layout: Layout, length: int) -> None:
    """vLLM's share of a GPU beside what training keeps there, and what of a sampler's is in that share."""
    engine = config.engine
    share = engine.vllm_memory * gpu_memory(config)
    findings.add("sampling", f"memory of each GPU; vLLM takes {engine.vllm_memory:.0%} of it")
    findings.weigh(
        "memory of sampling", resting_memory(sizes, layout) | {"vLLM": int(share)}, gpu_memory(config)
    )
    one = sampler_memory(sizes, layout, length, engine.vllm_tensor_parallel)
    findings.add("  vLLM", f"a response of full length in its cache, over {engine.vllm_tensor_parallel} GPUs")
    findings.weigh("vLLM's share", one, share)
    if "KV cache" in one:
        room = max(0, share - one["weights"]) / one["KV cache"]
        findings.add("  room for", f"{room:.0f} of full length at once in each copy of the sampler")


def weigh_evaluation(
    findings: Findings, sizes: Footprint, config: Config, layout: Layout, length: int
) -> None:
    """Held-out responses, all at once and in every process, by the model in training and never by vLLM.

    Before the first update every process still has the whole weights, and vLLM has not started.
    """
    tokens, memory = config.evaluation.prompts * length, gpu_memory(config)
    parts = sampling_memory(sizes, layout, tokens)
    if config.engine.vllm:
        parts["vLLM"] = int(config.engine.vllm_memory * memory)
    findings.add("evaluation", f"{config.evaluation.prompts} of full length at once in every process")
    findings.weigh("memory of evaluation", parts, memory)
    if layout.gpus > 1:
        whole = {"weights": layout.state_bytes * sizes.parameters}
        findings.add("  before training", "with the weights not sharded yet")
        first = whole | ({"KV cache": parts["KV cache"]} if "KV cache" in parts else {})
        findings.weigh("memory of the first evaluation", first, memory)


def weigh_loading(findings: Findings, config: Config, weights: int) -> None:
    """Every process loads all weights, on the host and then on its GPU, before FSDP2 shards them."""
    gpus = config.hardware.gpus
    findings.add("loading", "of all weights in every process, before they are sharded")
    findings.weigh("GPU memory of loading", {"on each GPU": weights}, gpu_memory(config))
    findings.weigh(
        "host memory of loading", {f"{gpus} copies on the host": gpus * weights}, host_memory(config)
    )


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


def layout_of(config: Config, reference: bool) -> Layout:
    """The native engine holds everything in one process; TRL's shards by FSDP2 and has a fused head."""
    trl = config.engine.name == "trl"
    return Layout(
        gpus=config.hardware.gpus,
        state_bytes=state_bytes(config),
        compute_bytes=2 if config.precision == "bfloat16" else state_bytes(config),
        reference=reference,
        checkpointing=trl and config.engine.gradient_checkpointing,
        fused_head=trl,
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
