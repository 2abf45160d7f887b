"""Measure what works of every family and form: `python -m tests.support_matrix ZOO [FOLDER ...] [--out PAGE]`.

ZOO is what `python -m tests.fixtures.make_zoo` wrote. Figures are kept in ZOO/measured.json, and only what isn't there
is measured, which takes half a minute a folder. See tests/model_checks.py for what is run.

Logits of a two-dimensional export are compared with ONNX Runtime on the same file, within 1e-3 of the largest logit;
those of a packed one with the two-dimensional export of the same weights, within a tolerance that follows from the
number format and the depth: see tests/reference_folders.py. A greedy token may be another only where the reference's
logits of both are within twice the tolerance; such near-ties are listed with both logits of both sides.
"""

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.fixtures.families import FORMS
from tests.model_checks import Checks, compare
from tests.reference_folders import reference_folder, tolerance

_PARTS = {"agreement", "chunks", "company", "faults"}
COLUMNS = ("logits", "tokens", "chunks", "company", "faults")
_ABOUT = {
    "cpu-fp32": "two-dimensional, float32",
    "cpu-int4": "two-dimensional, 4-bit weights, float32 activations",
    "cpu-int8": "two-dimensional, 8-bit weights, float32 activations",
    "paged-fp16": "packed, float16",
    "paged-bf16": "packed, bfloat16",
    "paged-int4": "packed, 4-bit weights, float16 activations",
}


def measure(zoo: Path, form: str, family: str, known: dict[str, Any]) -> dict[str, Any]:
    """Every column's figure or reason, as JSON, where it isn't known."""
    try:
        checks = Checks(zoo / form / family)
    except Exception as error:
        return {"refused": _line(error, zoo)}

    def agreement() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as temporary:
            reference = reference_folder(zoo, form, family, Path(temporary))
            expected = checks.reference_logits(reference)
            allowed = tolerance(checks, zoo, form, family, Path(temporary))
        found = compare(checks.logits, expected)
        return {
            "tolerance": allowed,
            "largest": float(found.differences.max()),
            "beyond": int((found.differences > allowed).sum()),
            "tokens": len(found.differences),
            "ties": [dataclasses.asdict(tie) for tie in found.ties],
            "wrong": len(found.wrong(allowed)),
        }

    runs: dict[str, Callable[[], Any]] = {
        "agreement": agreement,
        "chunks": checks.chunk_differences,
        "company": checks.company_differences,
        "faults": checks.fault_differences,
    }
    result = dict(known)
    for name in runs.keys() - known.keys():
        try:
            result[name] = runs[name]()
        except Exception as error:
            result[name] = {"failed": _line(error, zoo)}
    return result


def _is_complete(result: dict[str, Any]) -> bool:
    return "refused" in result or result.keys() >= _PARTS


def _line(error: Exception, zoo: Path) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).replace(f'{zoo}/', '').split())}"[:300]


def cells(result: dict[str, Any]) -> tuple[dict[str, str], int]:
    """What the table says of a folder, by column, and how many of its cells are as they should be."""
    if "refused" in result:
        return dict.fromkeys(COLUMNS, "not imported"), 0
    found, said, right = result["agreement"], {}, 0
    if "failed" in found:
        said["logits"] = said["tokens"] = "no reference"
    else:
        good = found["largest"] <= found["tolerance"]
        said["logits"] = f"{found['largest']:.1e}" + ("" if good else f" **above** at {found['beyond']}")
        same, ties = found["tokens"] - len(found["ties"]), len(found["ties"]) - found["wrong"]
        said["tokens"] = f"{same} of {found['tokens']}" + (
            f", {ties} near-tie{'s'[: ties > 1]}" if ties else ""
        )
        said["tokens"] += f", **{found['wrong']} wrong**" if found["wrong"] else ""
        right += good + (not found["wrong"])
    for name in COLUMNS[2:]:
        differences = result[name]
        same = "same tokens" if name == "faults" else "same bits"
        said[name] = "failed" if isinstance(differences, dict) else same if not differences else "**differs**"
        right += said[name] == same
    return said, right


def report(measured: dict[str, Any], failed: dict[str, str]) -> str:
    """The page, in Markdown."""
    lines = [*_INTRODUCTION, ""]
    rights = total = 0
    notes: list[str] = []
    for form in sorted({folder.split("/")[0] for folder in measured}, key=_order):
        lines += [f"## {form}: {_ABOUT.get(form, 'a variant')}", ""]
        lines += [
            "| Family | Logits | Tolerance | Tokens | Chunks | Company | Faults |",
            "| - | - | - | - | - | - | - |",
        ]
        for folder, result in sorted(measured.items()):
            if folder.split("/")[0] != form:
                continue
            said, right = cells(result)
            rights, total = rights + right, total + len(COLUMNS)
            found = result.get("agreement", {})
            allowed = f"{found['tolerance']:.1e}" if "tolerance" in found else ""
            columns = [said["logits"], allowed, *(said[name] for name in COLUMNS[1:])]
            lines.append(f"| {folder.split('/')[1]} | {' | '.join(columns)} |")
            notes += _notes(folder, result)
        lines.append("")
    lines += _listed("What isn't right, or a near-tie", notes)
    forms_of: dict[tuple[str, str], list[str]] = {}
    for folder, error in failed.items():
        form, family = folder.split("/")
        forms_of.setdefault((family, error), []).append(form)
    lines += _listed(
        "What the builder doesn't export",
        [f"{family} as {', '.join(forms)}: {error}" for (family, error), forms in forms_of.items()],
    )
    lines.append(f"{rights} of {total} cells are right, in {len(measured)} folders.")
    return "\n".join(lines) + "\n"


_INTRODUCTION = """# What is supported

Written by `python -m tests.support_matrix`. Models are small and random, made by `python -m tests.fixtures.make_zoo`
with the ONNX Runtime GenAI model builder, or by hand (gpt2). Each serves four prompts of 5, 3, 33 and 34 tokens, which
makes 123 greedy tokens.

- **Logits**: the largest difference from ONNX Runtime, as a share of the largest logit. ONNX Runtime runs no packed
  export on a CPU; it runs the two-dimensional one of the same weights. `tests/reference_folders.py` says how tolerances
  follow from the number format and the depth. In bfloat16 they are wide for experts and recurrences, whose own
  rounding changes which experts are chosen; float16, the same code, tells more there.
- **Tokens**: greedy tokens that ONNX Runtime chooses too.
- **Chunks**: a prompt taken in pieces of seven, beside whole.
- **Company**: four prompts together, beside each alone.
- **Faults**: seven steps that fail at seven stages, beside none.
""".splitlines()


def _order(form: str) -> tuple[int, str]:
    return (list(FORMS).index(form) if form in FORMS else len(FORMS), form)


def _notes(folder: str, result: dict[str, Any]) -> Iterator[str]:
    if "refused" in result:
        yield f"{folder}: {result['refused']}"
        return
    for name in ("agreement", *COLUMNS[2:]):
        found = result[name]
        if isinstance(found, dict) and "failed" in found:
            yield f"{folder}: {name}: {found['failed']}"
        elif name != "agreement" and found:
            yield f"{folder}: {name}: {found[0]}, {len(found)} in all"
    for tie in result["agreement"].get("ties", ()):
        (mine, best), (theirs_mine, theirs_best) = tie["mine"], tie["theirs"]
        yield (
            f"{folder}: ours over the reference's choice, {mine:.5g} over {best:.5g} here, "
            f"{theirs_mine:.5g} under {theirs_best:.5g} there"
        )


def _listed(title: str, entries: Iterable[str]) -> list[str]:
    entries = [f"- {entry}" for entry in entries]
    return [f"## {title}", "", *entries, ""] if entries else []


def main() -> None:
    """Measure what isn't measured and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("zoo", type=Path)
    parser.add_argument("folders", nargs="*", metavar="FORM/FAMILY", help="default: all of the zoo")
    parser.add_argument("--out", type=Path, default=Path("docs/support.md"))
    arguments = parser.parse_args()
    file = arguments.zoo / "measured.json"
    measured = json.loads(file.read_text()) if file.exists() else {}
    configs = sorted(arguments.zoo.glob("*/*/genai_config.json"), key=lambda path: _order(path.parts[-3]))
    for folder in arguments.folders or ["/".join(config.parts[-3:-1]) for config in configs]:
        known = measured.get(folder, {})
        if not _is_complete(known):
            measured[folder] = measure(arguments.zoo, *folder.split("/"), known)
            said, right = cells(measured[folder])
            print(folder, *said.values(), f"{right} of {len(COLUMNS)}", sep="  ", flush=True)
            file.write_text(json.dumps(measured, indent=1))
    failed = arguments.zoo / "failed.json"
    complete = {folder: result for folder, result in measured.items() if _is_complete(result)}
    arguments.out.write_text(report(complete, json.loads(failed.read_text()) if failed.exists() else {}))


if __name__ == "__main__":
    main()
