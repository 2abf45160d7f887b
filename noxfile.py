"""Every check of the project, for a developer's machine and for CI alike: run `nox`.

`nox` runs lint, types, tests (on the Python that runs nox), what is compiled for a Hopper card and, where the machine
has a newer Python, a fast part of the tests on the newest one and the newest JAX that it takes. What follows `--` goes
to pytest, as in `nox -s tests -- -k planning`.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True


# A worker a core; a file stays with one, so that what it compiles is compiled once. tests/conftest.py orders them.
IN_PARALLEL = ("-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder")


def newest_python() -> str | None:
    """Path of the newest released Python on PATH or under pyenv, None unless newer than the running one."""
    names = [f"python3.{minor}" for minor in range(sys.version_info.minor + 1, 30)]
    on_path = [Path(found) for name in names if (found := shutil.which(name))]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = on_path + list(pyenv.glob("3.*/bin/python"))
    versions = {version: path for path in candidates if (version := _release(path)) is not None}
    newest = max(versions, default=(0, 0))
    return str(versions[newest]) if newest > sys.version_info[:2] else None


def _release(python: Path) -> tuple[int, int] | None:
    """(major, minor) of a final release that starts, else None: pyenv's shims of inactive versions don't."""
    answer = subprocess.run([python, "--version"], capture_output=True, text=True, check=False)
    match = re.fullmatch(r"Python (\d+)\.(\d+)\.\d+", answer.stdout.strip())
    return (int(match[1]), int(match[2])) if match else None


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and formatting."""
    session.install(*_pinned("ruff"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Mypy over the packages."""
    session.install("-e", ".", *_pinned("mypy"))
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """The whole test suite."""
    session.install("-e", ".[test]")
    session.run("pytest", *IN_PARALLEL, "--durations=10", *session.posargs)


NEWEST = newest_python()


@nox.session(name="tests-newest", python=NEWEST)
def tests_newest(session: nox.Session) -> None:
    """Fast tests of the core of each package, so that a deprecation is seen early, and what `hopper` does."""
    if NEWEST is None:
        session.skip("this machine has no newer Python than {}.{}".format(*sys.version_info))
    session.install("--upgrade", "--upgrade-strategy=eager", "-e", ".[test]")
    session.run("python", "-c", "import sys, jax; print(sys.version, 'JAX', jax.__version__)")
    engine = "attention_in_engine engine kernels_in_engine lifecycle planning programs sampling streams toy transaction"
    core = {"jaxengine": engine.split(), "onnx_import": ["logits"]}
    files = [f"tests/{package}/test_{name}.py" for package, names in core.items() for name in names]
    chosen = ["tests/pallas_kernels", *files]
    session.run("pytest", *IN_PARALLEL, "-m", "not slow and not demo", *chosen, *session.posargs)
    _compile_for_hopper(session)


# CUDA 13's assembler and disassembler, and what XLA links; a fixed release, since figures in tests depend on it.
CUDA = tuple(f"{wheel}==13.5.37" for wheel in ("nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm", "nvidia-nvvm"))


@nox.session(default=False)
def hopper(session: nox.Session) -> None:
    """Kernels and programs compiled for an NVIDIA Hopper card, which needs no GPU."""
    session.install("-e", ".[test]")
    _compile_for_hopper(session)


def _compile_for_hopper(session: nox.Session) -> None:
    version = session.run("python", "-c", "import jax; print(jax.__version__)", silent=True).strip()
    # Without what they require: the libraries of CUDA are several gigabytes, and only a GPU needs them.
    plugin = [f"jax-cuda13-{part}=={version}" for part in ("plugin", "pjrt")]
    session.install("--no-deps", *plugin, *CUDA)
    session.env["JAX_PLATFORMS"] = "cpu"  # nothing here runs on a GPU, not even where there is one
    session.run("pytest", *IN_PARALLEL, "-m", "hopper", "tests/hopper", *session.posargs)


def _pinned(*tools: str) -> list[str]:
    """The requirements of `tools` as the dev extra pins them, so that one place names the versions."""
    dev = nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]["dev"]
    return [line for line in dev if re.match(r"[\w-]+", line)[0] in tools]
