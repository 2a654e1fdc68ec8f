"""The peers themselves, run again where they are installed: they still give the stored values, and ours equal
theirs on tensors that nobody stored."""

import importlib
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from safetensors.torch import load_file

GOLDEN = Path(__file__).parents[1] / "golden"
STORED = {"trl": "peer_values", "verl": "peer_values", "slime": "slime_values"}
INSTALL = {
    "trl": "pip install -e '.[peers]'",
    "verl": "the two lines for verl at the top of tests/golden/make_peer_values.py",
    "slime": "the line for slime at the top of tests/golden/make_peer_values.py",
}
OTHER_SEEDS = (8, 9, 10)


@pytest.fixture(scope="module")
def golden_module():
    """Function: name of a module beside the golden files -> the module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(GOLDEN)
        yield importlib.import_module


@pytest.fixture(params=STORED)
def peer(request):
    """A peer that is installed in the version whose values are stored."""
    header = json.loads((GOLDEN / f"{STORED[request.param]}.json").read_text())
    wanted = header["versions"][request.param]
    try:
        found = version(request.param)
    except PackageNotFoundError:
        found = "not installed"
    if found != wanted:
        pytest.skip(f"{request.param} {wanted} is stored, here it is {found}: {INSTALL[request.param]}")
    return request.param


def test_the_peer_still_gives_the_stored_values(peer, golden_module):
    live = golden_module("make_peer_values").record(peer)
    stored = load_file(GOLDEN / f"{STORED[peer]}.safetensors")
    for name, tensor in live.tensors.items():
        difference = (tensor.double() - stored[name].double()).abs().max().item()
        assert difference <= 1e-12 * max(1, stored[name].abs().max().item()), name
    header = json.loads((GOLDEN / f"{STORED[peer]}.json").read_text())
    for kind in ("cases", "value_cases"):
        expected = [case for case in header[kind] if case["peer"].split()[0] == peer]
        cases = json.loads(json.dumps(getattr(live, kind)))
        assert len(cases) == len(expected)
        for case, known in zip(cases, expected, strict=True):
            for numbers in ("counts", "reported"):  # another CPU differs in the last digit
                found, stored_ones = case.pop(numbers, {}), known.pop(numbers, {})
                assert found == pytest.approx(stored_ones, rel=1e-12, abs=1e-12)
            assert case == known


def test_ours_equal_the_peer_on_other_tensors(peer, golden_module):
    check_case, record = golden_module("compare").check_case, golden_module("make_peer_values").record
    for seed in OTHER_SEEDS:
        live = record(peer, seed)
        assert live.cases
        for case in live.cases + live.value_cases:
            try:
                check_case(case, live.tensors)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {case}") from error
