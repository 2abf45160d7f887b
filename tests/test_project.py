"""The project keeps its promises: arrows between packages, a bare install, documented names, small files."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "jaxengine": {"onnx_import", "pallas_kernels"},
    "onnx_import": set(),
    "pallas_kernels": set(),
}
PACKAGES = tuple(MAY_IMPORT)
MAX_LINES = 450


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported_packages(path: Path) -> set[str]:
    """First names of everything that a file imports, at its top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def requirements() -> tuple[set[str], set[str]]:
    """Normalised names of the distributions that a bare install brings, and of those that extras add."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {normalised(line) for line in project["dependencies"]}
    extras = {normalised(line) for lines in project["optional-dependencies"].values() for line in lines}
    return core, extras - core - {"jaxengine"}


def normalised(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement)[0].lower().replace("_", "-")


@pytest.mark.parametrize("package", PACKAGES)
def test_arrows_between_packages_go_one_way(package):
    forbidden = set(PACKAGES) - {package} - MAY_IMPORT[package]
    found = {str(path): imported_packages(path) & forbidden for path in python_files(package)}
    assert not {path: names for path, names in found.items() if names}


def test_third_party_imports_are_declared():
    core, extras = requirements()
    distributions = packages_distributions()
    undeclared = {
        (module, str(path.relative_to(ROOT)))
        for path in python_files(*PACKAGES)
        for module in imported_packages(path) - set(PACKAGES) - sys.stdlib_module_names
        if not {normalised(name) for name in distributions.get(module, [module])} & (core | extras)
    }
    assert not undeclared


def test_packages_import_on_a_bare_install():
    """With every distribution of the extras hidden, each package and the command line still import."""
    _, extras = requirements()
    hidden = sorted(name.replace("-", "_") for name in extras)
    program = f"""
import importlib, pkgutil, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Hidden())
for package in {PACKAGES}:
    found = importlib.import_module(package)
    for module in pkgutil.walk_packages(found.__path__, package + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_documented():
    undocumented = [
        f"{package.__name__}.{name}"
        for package in map(importlib.import_module, PACKAGES)
        for name in getattr(package, "__all__", ())
        if not is_documented(getattr(package, name), name)
    ]
    assert not undocumented


def is_documented(value: object, name: str) -> bool:
    """A constant needs no docstring; a dataclass without one has its signature in that place."""
    if not (inspect.isclass(value) or inspect.isroutine(value) or hasattr(value, "__wrapped__")):
        return True
    text = (vars(value).get("__doc__") if isinstance(value, type) else value.__doc__) or ""
    return bool(text) and not text.startswith(f"{name}(")


def test_files_stay_small():
    long = {
        str(path.relative_to(ROOT)): lines
        for path in [*python_files(*PACKAGES, "benchmarks", "examples"), ROOT / "noxfile.py"]
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long, "a file this long holds two ideas: split it"
