import json

import numpy as np
import pytest
import torch

from moe_rl.routing import RoutingError
from moe_rl.routing.formats.files import import_payload, read_payloads


def read(path, lay, format=None):
    return [
        (payload.format, payload.tokens, import_payload(payload, lay.model))
        for payload in read_payloads(path, format)
    ]


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("vllm http", "vllm"),
        ("vllm 0.21", "vllm"),
        ("sglang", "sglang"),
        ("sglang dtype", "sglang"),
        ("megatron inference", "megatron-inference"),
        ("router tracer", "router-tracer"),
        ("nemo-rl", "nemo-rl"),
        ("skyrl", "skyrl"),
        ("prime-rl", "prime-rl"),
    ],
)
def test_text_files_are_recognised_by_what_they_hold(lay, tmp_path, name, format):
    experts = lay.draw(9)
    value = lay.sources[name].write(experts)
    file = tmp_path / "routing"
    file.write_text(value if isinstance(value, str) else json.dumps(value))
    [(found, tokens, trace)] = read(file, lay)
    assert found == format
    assert tokens is None
    assert np.array_equal(trace.experts[0, :9].numpy(), experts)


def test_a_response_has_a_payload_per_choice_and_says_its_length(lay, tmp_path):
    experts = lay.draw(9)
    choice = {"routed_experts": lay.npy(lay.all_layers(experts).astype(np.uint8))}
    file = tmp_path / "response.json"
    usage = {"prompt_tokens": 4, "completion_tokens": 6}
    file.write_text(json.dumps({"choices": [choice], "usage": usage}))
    assert [(format, tokens) for format, tokens, _ in read(file, lay)] == [("vllm", 10)]
    file.write_text(json.dumps({"choices": [choice, choice], "usage": usage}))
    assert [payload.place for payload in read_payloads(file)] == ["choice 0", "choice 1"]
    assert [payload.tokens for payload in read_payloads(file)] == [None, None]


def test_the_prompt_s_rows_of_a_response_belong_to_every_choice(lay, tmp_path):
    experts = lay.draw(9)
    response = {
        "prompt_routed_experts": experts[:4].tolist(),
        "choices": [{"routed_experts": experts[4:].tolist()}, {"routed_experts": experts[4:7].tolist()}],
    }
    file = tmp_path / "response.json"
    file.write_text(json.dumps(response))
    assert [int(trace.valid.sum()) for _, _, trace in read(file, lay)] == [9, 7]


def test_a_server_s_own_count_catches_lost_rows(lay, tmp_path):
    meta = {"routed_experts": lay.b64(lay.all_layers(lay.draw(9)).astype("<i4"))}
    file = tmp_path / "response.json"
    file.write_text(json.dumps({"meta_info": meta | {"prompt_tokens": 4, "completion_tokens": 7}}))
    with pytest.raises(RoutingError, match="9 rows for 11 tokens"):
        read(file, lay)


def test_json_lines_of_samples(lay, tmp_path):
    lengths = (9, 5)
    samples = [{"tokens": [0] * (n + 1), "rollout_routed_experts": lay.draw(n).tolist()} for n in lengths]
    file = tmp_path / "samples.jsonl"
    file.write_text("\n".join(map(json.dumps, samples)))
    assert [(format, tokens) for format, tokens, _ in read(file, lay)] == [("slime", 10), ("slime", 6)]


def test_arrays_are_recognised_by_their_axes(lay, tmp_path):
    file = tmp_path / "routing.npy"
    full = lay.all_layers(lay.draw(9))
    for array, format in (
        (full, "vllm"),
        (full.reshape(9, -1), "sglang"),
        (full.reshape(-1).astype("i4"), "sglang"),
    ):
        np.save(file, array)
        [(found, _, trace)] = read(file, lay)
        assert found == format
        assert np.array_equal(trace.experts[0, :9].numpy(), lay.draw(9))


def test_a_batch_is_not_read_without_its_format(lay, tmp_path):
    file = tmp_path / "batch.npy"
    np.save(file, lay.all_layers(lay.draw(9)).swapaxes(0, 1)[None])
    with pytest.raises(RoutingError, match="name its format"):
        read_payloads(file)
    [(_, _, trace)] = read(file, lay, "tunix")
    assert np.array_equal(trace.experts[0, :9].numpy(), lay.draw(9))


def test_miles_dumps_have_a_payload_per_micro_batch(lay, tmp_path):
    file = tmp_path / "rank0_routing_replay.pt"
    torch.save([[torch.from_numpy(lay.draw(9)[:, layer].copy())] * 2 for layer in range(3)], file)
    assert [format for format, _, _ in read(file, lay)] == ["per-layer", "per-layer"]


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b"hello", b"\xff\xfe\x00", b"[[[[[", b'{"a": 1}\n{"b"', b"[" * 5000]
)
def test_files_without_routing_are_refused(lay, tmp_path, content):
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(RoutingError):
        read(file, lay)
