"""The arrows of the house plan: who may import whom, read off the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {
    "routing": {"routing"},
    "objectives": {"objectives"},
    "tasks": {"tasks"},
    "models": {"models", "routing"},
    "store": {"store"},
    "training": {"training", "routing", "objectives", "tasks", "models", "store"},
    "laboratory": {"laboratory", "routing", "training", "models", "tasks", "objectives", "store"},
    "integrations": {"integrations", "routing", "objectives"},
    "analysis": {"analysis", "store"},
    "evaluation": {"evaluation", "tasks", "analysis"},  # of analysis the statistics
    "tracking": {"tracking", "store"},
}
# Importable without an extra, in every room; analysis must never see torch or a model.
LIBRARIES = {
    "routing": {"torch", "transformers", "safetensors"},
    "objectives": {"torch", "transformers", "safetensors"},
}
OPTIONAL = {"megablocks", "trl", "reasoning_gym", "math_verify", "tensorboard", "wandb", "trackio"}


def modules():
    return sorted((ROOT / "moe_rl").rglob("*.py")) + sorted((ROOT / "experiments").rglob("*.py"))


def imports(path):
    """(module, at module level) of every import in a file; `from a import b` counts as a and a.b."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = set(ast.walk(ast.Module([n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)], [])))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module, node in top
            yield from ((f"{node.module}.{alias.name}", node in top) for alias in node.names)


def room_of(path):
    part = path.relative_to(ROOT).parts
    return part[0] if part[0] == "experiments" else part[1].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_arrows(path):
    room = room_of(path)
    for name, _ in imports(path):
        parts = name.split(".")
        if parts[0] == "moe_rl" and len(parts) > 1 and room in ROOMS:
            assert parts[1] in ROOMS[room], f"{room} must not import {name}"
        if parts[0] in ("hydra", "omegaconf"):
            assert room == "experiments", f"{name}: Hydra belongs to experiments/ only"
        if parts[0] == "experiments":
            assert room == "experiments", f"{room} must not import {name}"
        if room == "analysis":
            assert parts[0] not in ("torch", "transformers"), f"analysis must not import {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_room_needs(path):
    import sys

    allowed = LIBRARIES.get(room_of(path))
    for name, at_top in imports(path):
        top = name.split(".")[0]
        assert not (at_top and top in OPTIONAL), f"{name} is optional: import it where it is used"
        if allowed is not None:
            assert top in allowed | {"moe_rl", "numpy"} or top in sys.stdlib_module_names, name


@pytest.mark.parametrize("package", sorted(OPTIONAL))
def test_an_optional_package_is_imported_in_one_file(package):
    users = [p for p in modules() if any(name.split(".")[0] == package for name, _ in imports(p))]
    assert len(users) <= 1, users


def test_every_room_has_its_arrows():
    rooms = {p.name.removesuffix(".py") for p in (ROOT / "moe_rl").iterdir() if p.name[0] not in "_."}
    assert rooms <= ROOMS.keys()
