"""What is read is data: no file, name or text that comes in is run, nothing outside its place is touched."""

import ast
import io
import json
import pickle
import re
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from experiments.traces import model_sizes, read_trace
from moe_rl.analysis.report import write_report
from moe_rl.models import ModelConfig, ModelError, load_model
from moe_rl.objectives.diagnose.files import DumpError, read_entries
from moe_rl.routing import RoutingError, RoutingTrace, TraceStream
from moe_rl.routing.formats import ModelRouting
from moe_rl.routing.stream import MANIFEST, TraceWriter, _checksum
from moe_rl.store import Run, RunStore, find_runs
from moe_rl.tasks import char_tokenizer, get_task
from moe_rl.training.border import require_encodable

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*ROOT.glob("moe_rl/**/*.py"), *ROOT.glob("experiments/**/*.py")])
SIZES = ModelRouting(2, (0, 1), 8, 2)


class Code:
    """Writes a file when unpickled."""

    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return (Path.touch, (Path(self.file),))


# --- the source ---

PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CALLS = {  # a call -> the keyword that makes it harmless, None where nothing does
    "eval": None,
    "exec": None,
    "__import__": None,
    "os.system": None,
    "os.popen": None,
    "yaml.load": None,
    "yaml.unsafe_load": None,
    "yaml.full_load": None,
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}


def faults(source):
    """The lines of a Python source that could run what they read."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            if any(name.partition(".")[0] in PICKLES for name in names):
                yield node.lineno, names[0]
        if not isinstance(node, ast.Call):
            continue
        name, given = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
        if name in CALLS and (CALLS[name] is None or given.get(CALLS[name][0]) != str(CALLS[name][1])):
            yield node.lineno, name
        if name.endswith((".extract", ".extractall")) or given.get("shell") == "True":
            yield node.lineno, name
        # The user's option, or off: where it is not given, transformers asks on the terminal.
        trusted = given.get("trust_remote_code") not in ("False", "trust_remote_code")
        if name.startswith("Auto") and name.endswith(".from_pretrained") and trusted:
            yield node.lineno, name


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from joblib import load", "eval(text)", "exec(text)", "torch.load(path)",
        "torch.load(path, weights_only=False)", "np.load(path)", "np.load(path, allow_pickle=True)",
        "yaml.load(text)", "subprocess.run(text, shell=True)", "archive.extractall(path)",
        "AutoModel.from_pretrained(path)", "AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
    ],
)  # fmt: skip
def test_the_search_finds(line):
    assert list(faults(line))


def test_nothing_in_the_package_can_run_what_it_reads():
    assert len(SOURCES) > 100
    found = [(str(path.relative_to(ROOT)), *fault) for path in SOURCES for fault in faults(path.read_text())]
    assert found == []


# --- traces ---


@pytest.fixture
def touched(tmp_path):
    """A file that only executed code would make."""
    file = tmp_path / "touched"
    yield file
    assert not file.exists()


def trace(sequences=1):
    experts = torch.tensor([[[[0, 1], [2, 3]], [[4, 5], [6, 7]]]] * sequences)
    return RoutingTrace(experts, torch.ones(sequences, 2, dtype=torch.bool), (0, 1), 8)


@pytest.mark.parametrize("suffix", [".pt", ".pkl", ".npy", ".npz", ".safetensors", ".json"])
def test_a_pickle_is_refused_under_any_name(tmp_path, touched, suffix):
    code = Code(touched)
    archive = io.BytesIO()
    torch.save([[code]], archive)
    legacy = io.BytesIO()
    torch.save([[code]], legacy, _use_new_zipfile_serialization=False)
    array = io.BytesIO()
    np.save(array, np.array([code], dtype=object), allow_pickle=True)
    arrays = io.BytesIO()
    np.savez(arrays, np.array([code], dtype=object))
    for name, data in {
        "plain": pickle.dumps(code),
        "zip": archive,
        "legacy": legacy,
        "npy": array,
        "npz": arrays,
    }.items():
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(data if isinstance(data, bytes) else data.getvalue())
        with pytest.raises(RoutingError):
            read_trace(path, SIZES)
        with pytest.raises(RoutingError):
            RoutingTrace.load(path)
        try:
            tensors, _ = read_entries(path, {"arr_0"})
        except DumpError:
            continue
        assert not tensors, "an archive without arrays"


@pytest.mark.parametrize(
    "member", ["../outside.npy", "/tmp/outside.npy", "a/../../outside.npy", "..\\outside.npy"]
)
def test_members_that_point_outside_are_not_written(tmp_path, member):
    """An archive is read in memory: a member's name is a name."""
    folder = tmp_path / "folder"
    folder.mkdir()
    array = io.BytesIO()
    np.save(array, np.arange(3))
    path = folder / "dump.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, array.getvalue())
    before = sorted(tmp_path.rglob("*"))
    _, others = read_entries(path, {"logp"})
    assert len(others) == 1
    with pytest.raises(RoutingError):
        read_trace(path, SIZES)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "files", [["../secret.safetensors"], "../secret.safetensors", 10**12, -1, True, 2, 1.0]
)
def test_a_streams_index_names_no_files(tmp_path, files):
    secret = tmp_path / "secret.safetensors"
    trace().save(secret)
    path = tmp_path / "stream"
    with TraceWriter(path, (0, 1), 8, 2) as writer:
        writer.append(trace())
    manifest = json.loads((path / MANIFEST).read_text()) | {"files": files}
    manifest["checksum"] = _checksum({key: value for key, value in manifest.items() if key != "checksum"})
    (path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(RoutingError, match=r"damaged|should hold"):
        TraceStream(path)


def test_a_link_out_of_a_stream_is_read_like_any_file(tmp_path):
    """Nothing but a trace is accepted at its end, and nothing of it is shown."""
    secret = tmp_path / "secret"
    secret.write_text("top secret")
    path = tmp_path / "stream"
    with TraceWriter(path, (0, 1), 8, 2) as writer:
        writer.append(trace())
    (path / "000000.safetensors").unlink()
    (path / "000000.safetensors").symlink_to(secret)
    with pytest.raises(RoutingError) as error:
        TraceStream(path).load()
    assert "top secret" not in str(error.value)
    assert secret.read_text() == "top secret"


# --- checkpoints ---

QWEN = {
    "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1,
    "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "intermediate_size": 16, "norm_topk_prob": True, "max_position_embeddings": 64,
}  # fmt: skip
MODULE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
Path({file!r}).touch()
class OddConfig(Qwen3MoeConfig):
    model_type = "odd"
class OddModel(Qwen3MoeForCausalLM):
    config_class = OddConfig
class OddTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def checkpoint(tmp_path, touched):
    """A real checkpoint with a module of its own, and what is changed in its two JSON files."""

    def make(config=(), tokenizer=(), module_at=touched):
        path = tmp_path / "checkpoint"
        load_model(ModelConfig(name="m", config=QWEN), lambda: char_tokenizer("0123456789=")).save(path)
        (path / "odd.py").write_text(MODULE.format(file=str(module_at)))
        for name, changes in (("config.json", config), ("tokenizer_config.json", tokenizer)):
            content = json.loads((path / name).read_text()) | dict(changes)
            (path / name).write_text(json.dumps(content))
        return path

    return make


AUTO_MAP = {"auto_map": {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddModel"}}
ODD_MODEL = AUTO_MAP | {"model_type": "odd"}
ODD_TOKENIZER = {"auto_map": {"AutoTokenizer": ["odd.OddTokenizer", None]}, "tokenizer_class": "OddTokenizer"}


def test_a_checkpoints_own_code_is_not_run(checkpoint):
    path = checkpoint(ODD_MODEL, ODD_TOKENIZER)
    with pytest.raises(ModelError, match=r"code of its own.*only with model.trust_remote_code=true$"):
        load_model(ModelConfig(name="m", source="checkpoint", path=str(path)), lambda: None)
    with pytest.raises(RoutingError, match="trust_remote_code"):
        model_sizes(path, None, None, None, None)


def test_code_beside_what_transformers_knows_is_ignored(checkpoint):
    config = ModelConfig(name="m", source="checkpoint", path=str(checkpoint(AUTO_MAP, ODD_TOKENIZER)))
    lm = load_model(config, lambda: None)
    assert {type(part).__module__.partition(".")[0] for part in (lm.model, lm.tokenizer)} == {"transformers"}


def test_the_user_may_trust_a_checkpoint(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    proof = tmp_path / "trusted"
    path = checkpoint(ODD_MODEL, ODD_TOKENIZER, module_at=proof)
    config = ModelConfig(name="m", source="checkpoint", path=str(path), trust_remote_code=True)
    lm = load_model(config, lambda: None)
    assert (type(lm.model).__name__, type(lm.tokenizer).__name__) == ("OddModel", "OddTokenizer")
    assert proof.exists(), "so the tests above would have noticed"


def test_pickled_weights_are_refused(checkpoint, touched):
    path = checkpoint()
    (path / "model.safetensors").unlink()
    torch.save({"weight": Code(touched)}, path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(ModelConfig(name="m", source="checkpoint", path=str(path)), lambda: None)


def test_a_chat_template_cannot_reach_python(touched):
    lm = load_model(ModelConfig(name="m", config=QWEN), lambda: char_tokenizer("0123456789="))
    lm.tokenizer.chat_template = (
        "{{ messages.__class__.__mro__[1].__subclasses__() }}{{ ''.__class__.__init__.__globals__ }}"
    )
    with pytest.raises(ValueError, match="cannot encode the task's prompt"):
        require_encodable(lm, get_task("sort", min_length=2, max_length=2))


# --- run directories and the report ---


def test_yaml_of_a_run_makes_no_objects(tmp_path, touched):
    with RunStore.open(tmp_path / "run", {"seed": 0}, {}):
        pass
    text = (
        f"seed: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{touched}']]\n"
    )
    (tmp_path / "run" / "config.yaml").write_text(text)
    with pytest.raises(Exception) as error:
        Run(tmp_path / "run").config["seed"]
    assert "python/object" in str(error.value) or "config.yaml" in str(error.value)
    with pytest.raises(yaml.YAMLError):
        yaml.safe_load(text)


BAD = "<script>alert('x')</script>\"'&<img src=x onerror=alert(1)>"
ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "ul", "li", "a", "div", "span",
    "table", "thead", "tbody", "tr", "th", "td", "small", "code", "pre", "figure", "img", "figcaption",
}  # fmt: skip


class Tags(HTMLParser):
    """Collects what a browser would make elements and attributes of."""

    def __init__(self):
        super().__init__()
        self.tags, self.attributes = set(), set()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}


def everywhere(value):
    """A config in which every string is hostile, keys too."""
    if isinstance(value, dict):
        return {f"{key}": everywhere(inner) for key, inner in value.items()} | {BAD: BAD}
    return f"{value}{BAD}" if isinstance(value, str) else value


def test_the_report_escapes_everything_that_it_shows(tmp_path):
    config = {
        "arm": "grpo", "experiment": "demo", "seed": 0, "steps": 2, "model": {"name": "tiny"},
        "task": {"name": "sort", "path": "a"}, "objective": {"name": "grpo"}, "replay": {"source": None},
        "optim": {"lr": 1e-3},
    }  # fmt: skip
    environment = {
        "git_commit": BAD, "platform": BAD, "cpu_count": BAD, "versions": {"torch": BAD},
        "command": [BAD, "experiments.train"],
    }  # fmt: skip
    for number, arm in enumerate(("grpo", "gspo", 'a, "b"\n$\\frac{$ =1+1')):
        hostile = everywhere(config) | {"steps": 2, "arm": f"{arm}{BAD}"}
        with RunStore.open(tmp_path / f"runs/{number}", hostile, environment) as store:
            for step in (1, 2):
                record = {"step": step, "reward/mean": 0.5, "loss": 0.1, "grad_norm": 1.0, BAD: 1.0}
                store.log("steps", record)
            store.log("evals", {"step": 0, "eval/greedy": 0.5, "eval/sampled": 0.5, "eval/n": 8})
            store.event(BAD, text=BAD)
            if number == 0:
                store.fail(f"collapsed: {BAD}\n{BAD}")
            elif number == 1:
                store.fail(f"{BAD}\n{BAD}")
    page = write_report(find_runs(tmp_path / "runs"), tmp_path / "out", BAD)
    text = page.read_text(encoding="utf-8")
    assert re.search(r"&lt;script&gt;alert", text)
    assert "<script" not in text.lower() and "<img src=x" not in text.lower()
    parser = Tags()
    parser.feed(text)
    assert parser.tags <= ALLOWED, parser.tags - ALLOWED
    assert not {name for name in parser.attributes if name.startswith("on")}
    assert parser.attributes <= {
        "charset",
        "class",
        "id",
        "href",
        "src",
        "alt",
        "lang",
        "name",
        "content",
        "colspan",
    }
    tables = list((tmp_path / "out" / "tables").glob("*runs.csv"))
    arms = set(pd.read_csv(tables[0])["arm"])
    assert len(arms) == 3 and all(BAD in arm for arm in arms), "cells come back as they were"
    inside = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")}
    assert inside <= {"runs", "out"}, "names of runs and arms lead nowhere else"
