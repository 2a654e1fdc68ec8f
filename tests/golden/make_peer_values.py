"""Run TRL's, verl's and slime's own loss functions on fixed tensors and store what they return. Run by hand:

    pip install torch==2.13.0 trl==1.16.0
    pip install --no-deps verl==0.9.1
    pip install packaging numpy ray tensordict omegaconf transformers codetiming orjson
    pip install --no-deps git+https://github.com/THUDM/slime@624b824a898ab0ec1fcb4d373004c7f3852bf515
    python tests/golden/make_peer_values.py

Last run with Python 3.11 on a CPU, transformers 5.24.0, tensordict 0.15.3 and ray 2.60.0. verl declares
transformers < 5.11 and tensordict <= 0.10, hence --no-deps; what is called here runs with the newer ones.
slime's losses need torch alone.

Writes peer_values.{safetensors,json} (TRL and verl) and slime_values.{safetensors,json}: scenes, losses and
gradients; versions and, for each case, the objective of ours that must give the same. The tests compare ours
with these files, and call `record` again wherever a peer is installed.

A case's "scale" and "offset" are known differences: ours == scale * peer + offset.
"""

import importlib
import json
from importlib.metadata import version
from pathlib import Path

from safetensors.torch import save_file
from scenes import STORED_SEED, Recording

HERE = Path(__file__).parent
FILES = {"peer_values": ("trl", "verl"), "slime_values": ("slime",)}


def record(peer, seed=STORED_SEED):
    """The Recording of an installed peer: "trl", "verl" or "slime"."""
    recording = Recording(peer, seed)
    importlib.import_module(f"{peer}_peer").record(recording)
    return recording


def main():
    for name, peers in FILES.items():
        recordings = [record(peer) for peer in peers]
        tensors = {key: tensor for recording in recordings for key, tensor in recording.tensors.items()}
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, HERE / f"{name}.safetensors")
        header = {
            "versions": {package: version(package).split("+")[0] for package in (*peers, "torch")},
            "cases": [case for recording in recordings for case in recording.cases],
            "value_cases": [case for recording in recordings for case in recording.value_cases],
        }
        (HERE / f"{name}.json").write_text(json.dumps(header, indent=1) + "\n")
        print(f"{name}: {len(header['cases'])} + {len(header['value_cases'])} cases, {header['versions']}")


if __name__ == "__main__":
    main()
