"""Trace streams on disk: damaged bytes, and files lost, renamed or doubled, are refused or change nothing."""

import shutil

import pytest
import torch
from hypothesis import strategies as st

from moe_rl.routing import RoutingError, RoutingTrace, TraceStream, TraceWriter

LAYERS, E, K = (1, 3), 16, 4


def make(B, T, seed):
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(B, T, 2, E, generator=generator).argsort(-1)[..., :K]
    valid = torch.rand(B, T, generator=generator) < 0.8
    return RoutingTrace(experts, valid, LAYERS, E).where(valid)


def same(one, other):
    return torch.equal(one.valid, other.valid) and torch.equal(one.experts.long(), other.experts.long())


@pytest.fixture(scope="module", params=[0, 1], ids=["sequences", "rows"])
def stream(request, tmp_path_factory):
    """A finished stream of three files and what it holds; both ways of joining would fit the shapes."""
    path = tmp_path_factory.mktemp("stream") / "good"
    with TraceWriter(path, LAYERS, E, K, dim=request.param, buffer_bytes=1) as writer:
        for seed in range(3):
            writer.append(make(2, 5, seed))
    return path, TraceStream(path).load()


@pytest.mark.parametrize("cases", [100, pytest.param(3_000, marks=pytest.mark.slow)])
def test_a_damaged_stream_is_refused_or_reads_as_before(stream, tmp_path, campaign, damaged, cases):
    good, kept = stream
    path = tmp_path / "stream"

    def check(data):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(good, path)
        files = sorted(path.iterdir())
        file = data.draw(st.sampled_from([*files, files[-1], files[-1]]))  # mostly the manifest
        fault = data.draw(st.sampled_from(["bytes", "bytes", "bytes", "lost", "renamed", "doubled"]))
        if fault == "bytes":
            file.write_bytes(data.draw(damaged(file.read_bytes())))
        elif fault == "lost":
            file.unlink()
        elif fault == "renamed":
            file.rename(path / data.draw(st.sampled_from(["000003.safetensors", "000001.old", "stream.jsn"])))
        else:
            shutil.copy(file, path / data.draw(st.sampled_from(["000003.safetensors", "notes.txt"])))
        try:
            read = TraceStream(path)
            assert read.complete and same(read.load(), kept)
        except RoutingError:
            return f"{fault}: refused"
        return f"{fault}: unchanged"

    endings = campaign(check, st.data(), cases=cases)
    assert endings["bytes: refused"] > 5 * endings["bytes: unchanged"]
    assert not endings["lost: unchanged"] and not endings["renamed: unchanged"]


def test_every_bit_of_the_manifest(stream, tmp_path):
    good, kept = stream
    path = tmp_path / "stream"
    shutil.copytree(good, path)
    manifest = (good / "stream.json").read_bytes()
    refused = 0
    for at in range(len(manifest)):
        for bit in range(8):
            changed = manifest[:at] + bytes([manifest[at] ^ 1 << bit]) + manifest[at + 1 :]
            (path / "stream.json").write_bytes(changed)
            try:
                assert same(TraceStream(path).load(), kept)
            except RoutingError:
                refused += 1
    assert refused > 0.95 * 8 * len(manifest)
