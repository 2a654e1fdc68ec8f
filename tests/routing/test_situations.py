"""Recording and replay in the situations that training meets: layouts of rows, backends, wrappers."""

import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_rl.routing import (
    RoutingError,
    RoutingTrace,
    find_routers,
    has_routers,
    record_routing,
    replay_routing,
)


def foreign(trace: RoutingTrace) -> RoutingTrace:
    generator = torch.Generator().manual_seed(7)
    noise = torch.rand(*trace.experts.shape[:3], trace.num_experts, generator=generator)
    return dataclasses.replace(trace, experts=noise.argsort(-1)[..., : trace.top_k])


def step(model: nn.Module, **inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(**inputs).logits
    logits.float().log_softmax(-1)[..., 5].sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_record_and_replay(model: nn.Module, **inputs: Tensor) -> None:
    """Recording and own replay change no bit; a foreign trace is followed and moves the logits."""
    plain = step(model, **inputs)
    with record_routing(model) as recorder:
        recorded = step(model, **inputs)
    trace = recorder.trace()
    with replay_routing(model, trace) as replay:
        replayed = step(model, **inputs)
    for other in (recorded, replayed):
        assert torch.equal(plain[0], other[0])
        assert plain[1].keys() == other[1].keys()
        assert [name for name in plain[1] if not torch.equal(plain[1][name], other[1][name])] == []
    assert torch.equal(replay.native.experts, trace.experts)
    with record_routing(model) as recorder, replay_routing(model, foreign(trace)):
        forced = step(model, **inputs)
    used = recorder.trace()
    assert torch.equal(used.experts[trace.valid].long(), foreign(trace).experts[trace.valid])
    assert not torch.equal(plain[0], forced[0])


def test_right_padding(build, batch):
    model = build("qwen3_moe")
    ids, mask = (tensor.flip(1) for tensor in batch)
    assert_record_and_replay(model, input_ids=ids, attention_mask=mask)
    with record_routing(model) as recorder:
        model(input_ids=ids, attention_mask=mask)
    # the tokens of a right-padded row route as they do alone
    with record_routing(model) as alone:
        model(input_ids=ids[2:, :5])
    assert torch.equal(recorder.trace().experts[2, :5], alone.trace().experts[0])


def test_packed_sequences(build, batch):
    model = build("qwen3_moe")
    ids, _ = batch
    packed = torch.cat([ids[0, :4], ids[0, 4:]])[None]
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    assert_record_and_replay(model, input_ids=packed, position_ids=position_ids)
    with record_routing(model) as recorder:
        model(input_ids=packed, position_ids=position_ids, use_cache=False)
        model(input_ids=ids[:1, 4:])
    whole, part = recorder.traces()
    assert torch.equal(whole.experts[:, 4:], part.experts)
    assert whole.valid.all()


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_experts_implementations(build, batch, implementation):
    model = build("qwen3_moe")
    model.set_experts_implementation(implementation)
    assert_record_and_replay(model, input_ids=batch[0], attention_mask=batch[1])


def test_autocast(build, batch):
    model = build("qwen3_moe")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_record_and_replay(model, input_ids=batch[0], attention_mask=batch[1])


def test_phimoe_samples_the_same_in_training_mode(batch):
    from transformers import PhimoeConfig, PhimoeForCausalLM

    torch.manual_seed(0)
    sizes = dict(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_local_experts=8
    )
    model = PhimoeForCausalLM(PhimoeConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).train()
    inputs = dict(input_ids=batch[0], attention_mask=batch[1])
    torch.manual_seed(1)
    with record_routing(model) as recorder:
        plain = step(model, **inputs)
    torch.manual_seed(1)
    with replay_routing(model, recorder.trace()) as replay:
        replayed = step(model, **inputs)
    assert torch.equal(plain[0], replayed[0])
    assert all(torch.equal(plain[1][name], replayed[1][name]) for name in plain[1])
    assert torch.equal(replay.native.experts, recorder.trace().experts)
    torch.manual_seed(2)  # other noise, same experts: what is sampled no longer matters
    with record_routing(model) as again, replay_routing(model, recorder.trace()) as replay:
        model(**inputs)
    assert torch.equal(again.trace().experts, recorder.trace().experts)
    assert not torch.equal(replay.native.experts, recorder.trace().experts)


@pytest.mark.slow
@pytest.mark.parametrize("compiled_first", [True, False])
def test_torch_compile(build, batch, compiled_first):
    torch.compiler.reset()
    model = build("qwen3_moe")
    inputs = dict(input_ids=batch[0], attention_mask=batch[1])
    plain = step(model, **inputs)[0]
    compiled = torch.compile(model, backend="eager")
    if compiled_first:
        step(compiled, **inputs)
    assert_record_and_replay(compiled, **inputs)
    assert torch.allclose(compiled(**inputs).logits, plain, atol=1e-5)


def test_peft_adapters(build, batch):
    peft = pytest.importorskip("peft")
    model = build("qwen3_moe")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    assert [router.layer_id for router in find_routers(adapted)] == [1, 2]
    assert_record_and_replay(adapted, input_ids=batch[0], attention_mask=batch[1])


def test_peft_copies_of_the_router(build, batch):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["gate"])
    adapted = peft.get_peft_model(build("qwen3_moe"), config)
    assert [router.layer_id for router in find_routers(adapted)] == [1, 2]
    assert_record_and_replay(adapted, input_ids=batch[0], attention_mask=batch[1])
    gradients = step(adapted, input_ids=batch[0], attention_mask=batch[1])[1]
    for router in find_routers(adapted):
        assert gradients[f"{router.name}.weight"].abs().max() > 0


def test_accelerate_hooks(build, batch):
    hooks = pytest.importorskip("accelerate.hooks")
    model = build("qwen3_moe")
    for module in list(model.modules()):  # what device_map does on several devices
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True))
    assert_record_and_replay(model, input_ids=batch[0], attention_mask=batch[1])


def test_multi_token_prediction_heads_are_left_out(build, batch):
    model = build("qwen3_moe")
    inputs = dict(input_ids=batch[0], attention_mask=batch[1])
    head = nn.Module()
    head.layers = nn.ModuleList([type(model.model.layers[1])(model.config, 1)])
    for parameter in head.parameters():
        nn.init.normal_(parameter, 0, 0.1)
    model.model.mtp = head
    assert [router.name for router in find_routers(model)] == [
        f"model.layers.{layer}.mlp.gate" for layer in (1, 2)
    ]
    model.forward = _with_head(model, head)
    assert_record_and_replay(model, **inputs)


def _with_head(model, head):
    plain = model.forward

    def forward(input_ids, attention_mask):
        output = plain(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
        output.logits = output.logits + head.layers[0].mlp(output.hidden_states[-1]).sum()
        return output

    return forward


def test_fused_kernels_are_refused(build):
    model = build("gpt_oss")
    model._use_kernels = True  # what from_pretrained(use_kernels=True) leaves behind
    with pytest.raises(RoutingError, match="use_kernels=False"):
        record_routing(model)
    assert has_routers(model)


def test_a_subclass_of_a_family_from_another_file(batch):
    class Custom(Qwen3MoeForCausalLM):
        pass

    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=1, head_dim=8)
    experts = dict(num_experts=8, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2)
    assert_record_and_replay(Custom(Qwen3MoeConfig(**sizes, **experts)), input_ids=batch[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_data_parallel(kind):
    """Two gloo processes run data_parallel.py, which compares the wrapped model with the plain one."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = os.environ | dict(MASTER_ADDR="localhost", MASTER_PORT=str(port), WORLD_SIZE="2")
    command = [sys.executable, str(Path(__file__).with_name("data_parallel.py")), kind]
    workers = [subprocess.Popen(command, env=common | dict(RANK=str(rank))) for rank in range(2)]
    assert [worker.wait(timeout=300) for worker in workers] == [0, 0]
