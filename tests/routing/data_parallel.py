"""One of two processes of `test_data_parallel`: record and replay under DDP or FSDP2."""

import dataclasses
import sys

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_rl.routing import RoutingTrace, record_routing, replay_routing


def foreign(trace: RoutingTrace) -> RoutingTrace:
    generator = torch.Generator().manual_seed(7)
    noise = torch.rand(*trace.experts.shape[:3], trace.num_experts, generator=generator)
    return dataclasses.replace(trace, experts=noise.argsort(-1)[..., : trace.top_k])


def step(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(input_ids=ids).logits
    logits.log_softmax(-1)[..., 5].sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {n: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for n, g in gradients.items()}
    return logits.detach(), whole


def wrap(model: nn.Module, kind: str) -> nn.Module:
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
    return torch.distributed.fsdp.fully_shard(model, mesh=mesh)


def main(kind: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2, head_dim=8)
    experts = dict(num_experts=8, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    ids = torch.randint(0, 64, (2, 6), generator=generator)
    plain = step(model, ids)[0]
    wrapped = wrap(model, kind)
    with record_routing(wrapped) as recorder:
        recorded = step(wrapped, ids)
    trace = recorder.trace()
    with replay_routing(wrapped, trace) as replay:
        replayed = step(wrapped, ids)
    assert torch.equal(recorded[0], plain) and torch.equal(replayed[0], plain)
    assert [name for name in recorded[1] if not torch.equal(recorded[1][name], replayed[1][name])] == []
    assert torch.equal(replay.native.experts, trace.experts)
    with record_routing(wrapped) as recorder, replay_routing(wrapped, foreign(trace)):
        forced = step(wrapped, ids)
    assert torch.equal(recorder.trace().experts.long(), foreign(trace).experts)
    assert not torch.equal(forced[0], plain)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
