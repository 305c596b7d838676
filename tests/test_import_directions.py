"""Data flows in one direction: each package imports only the packages listed for it here.

The table follows the data flow of the architecture. Function-level and type-checking imports count.
"""

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FOUNDATION = {
    "accelerators",
    "dispatch",
    "errors",
    "files",
    "limits",
    "progress",
    "registry",
    "run_slots",
    "signals",
    "status",
    "timeline",
}
"""What every package of manus_jax may import."""

ALLOWED: dict[str, set[str]] = {
    "accelerators": set(),
    "envs": set(),
    "dispatch": set(),
    "errors": set(),
    "files": set(),
    "limits": set(),
    "progress": set(),
    "registry": set(),
    "run_slots": set(),
    "signals": set(),
    "status": set(),
    "timeline": set(),
    "command": set(),
    "config": set(),
    "data_proto": set(),
    "data": {"config"},
    "algorithms": {"data_proto"},
    "rewards": {"servers"},  # judges
    "servers": set(),
    "models": {"config", "data"},
    "learner": {"algorithms", "config", "data_proto", "models"},
    "engines": {"config", "models"},
    "weights": {"config", "models", "engines"},  # engines: their errors
    "vllm": {"config", "models", "engines", "servers", "weights"},
    "agentgym": {"config", "envs", "servers"},
    "rollout": {
        "agentgym",
        "algorithms",  # reward allocation
        "config",
        "data",
        "data_proto",
        "engines",
        "envs",
        "models",  # the tokenizer and weights that an engine is opened with
        "rewards",
        "servers",  # chat APIs as policies
        "vllm",
    },
    "evaluation": {
        "agentgym",
        "config",
        "data",
        "engines",
        "envs",
        "models",
        "rollout",
        "servers",  # chat APIs as policies
    },
    "reporting": {"config", "data", "rollout"},
    "training": {
        "agentgym",
        "algorithms",
        "config",
        "data",
        "data_proto",
        "engines",
        "envs",
        "evaluation",
        "learner",
        "models",
        "reporting",
        "rewards",
        "rollout",
        "weights",
    },
    "planning": {
        "algorithms",
        "config",
        "data_proto",
        "engines",  # the programs of the embedded engine
        "learner",
        "models",
        "rollout",
        "training",
    },
}

LIBRARY = set(ALLOWED) - {"envs", "planning"}
COMMANDS: dict[str, set[str]] = {
    "convert": LIBRARY,
    "endpoint": LIBRARY,
    "evaluate": LIBRARY,
    "plan": LIBRARY | {"planning"},
    "publish": LIBRARY,
    "report": {"command", "reporting"},
    "serve": LIBRARY,
    "sft": LIBRARY,
    "traces": {"command", "rollout"},
    "train": LIBRARY,
}
"""The command-line modules. Nothing imports them."""

ENVS_SURFACE = {
    "envs.bounded_connection",
    "envs.game",
    "envs.interrupts",
    "envs.items",
    "envs.registry",
}
"""The modules of envs that manus_jax may import."""


def modules() -> list[Path]:
    return [path for top in ("envs", "manus_jax") for path in sorted((ROOT / top).rglob("*.py"))]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
    """The row of the table for a module: its subpackage, or its own name at the top level."""
    top, _, rest = module.partition(".")
    if top == "envs":
        return "envs"
    name = rest.partition(".")[0]
    return "data_proto" if name.startswith("data_proto") else name


@functools.cache
def imported_modules(path: Path) -> tuple[str, ...]:
    """The modules of this project that a file imports anywhere."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports absolutely"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found += (name for name in names if name.partition(".")[0] in ("envs", "manus_jax"))
    return tuple(found)


def violations() -> set[tuple[str, str]]:
    found = set()
    for path in modules():
        module = module_name(path)
        package = package_of(module)
        if not package:  # manus_jax/__init__.py
            continue
        allowed = ALLOWED.get(package, COMMANDS.get(package))
        assert allowed is not None, f"{package} is not in the table"
        foundation = set() if package == "envs" else FOUNDATION
        for imported in map(package_of, imported_modules(path)):
            if imported not in {"", package, *allowed, *foundation}:
                found.add((module, imported))
    return found


def test_packages_import_only_what_the_table_allows() -> None:
    assert violations() == set(), "imports against the direction of the data flow"


def test_the_table_has_no_cycles() -> None:
    graph = {name: allowed | FOUNDATION - {name} for name, allowed in ALLOWED.items()}
    graph |= {name: {"errors"} - {name} for name in FOUNDATION}
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(order) == set(ALLOWED)


def test_every_row_of_the_table_is_a_module_or_a_package() -> None:
    existing = {package_of(module_name(path)) for path in modules()} - {""}
    assert existing == {*ALLOWED, *COMMANDS}


def test_manus_jax_uses_only_the_declared_surface_of_envs() -> None:
    used = {
        module
        for path in modules()
        if "manus_jax" in path.relative_to(ROOT).parts
        for module in imported_modules(path)
        if package_of(module) == "envs"
    }
    outside = {
        module
        for module in used
        if module not in ENVS_SURFACE and module.rpartition(".")[0] not in ENVS_SURFACE
    }
    assert outside == set()


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        (
            "manus_jax.report",
            "flax orbax optax transformers manus_jax.models manus_jax.learner manus_jax.engines",
        ),
        ("envs.serve", "jax flax transformers pyarrow manus_jax"),
        # An environment that has vLLM only does not have these.
        ("manus_jax.serve", "jax flax optax orbax chex gin pyarrow tensorboardX minigrid"),
        pytest.param("manus_jax.train", "torch transformers.models.auto", marks=pytest.mark.slow),
    ],
)
def test_a_command_does_not_load_heavy_modules_it_does_not_need(module: str, heavy: str) -> None:
    code = f"import sys, {module}; print(*sorted(set({heavy.split()!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
