"""What a process takes beyond its model when it resumes, and in its first backward.

A model of 40 million parameters with AdamW (640 MB of weights and state) is trained, snapshotted
and resumed; bytes per parameter over what the process held when the model was built.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from harness import programs, report

STAGES = (
    "resume peak", "resumed", "first backward peak", "first step peak", "second step peak",
)  # fmt: skip


def one_run(args: object, directory: Path, steps: int) -> dict[str, int]:
    out = directory / "out.json"
    programs.complete(
        [
            *programs.launcher(args.ranks), programs.program("memory.py"),  # type: ignore[attr-defined]
            "--millions", str(args.millions), "--steps", str(steps),  # type: ignore[attr-defined]
            "--snapshots", str(directory / "snapshots"), "--out", str(out),
        ]
    )  # fmt: skip
    found: dict[str, int] = json.loads(out.read_text())
    return found


def main() -> None:
    parser = report.options(__doc__ or "")
    parser.add_argument("--millions", type=int, default=40, help="parameters (default: 40)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--directory", metavar="DIR", help="disk for the snapshots")
    args = parser.parse_args()
    if args.quick:
        args.millions = 5
    facts = report.machine()
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        fresh = one_run(args, Path(name), 2)
        resumed = one_run(args, Path(name), 4)
    rows = []
    for stage in STAGES:
        cells = [
            f"{(found[stage] - found['built']) * 1024 / args.millions / 1e6:.1f}"
            for found in (fresh, resumed)
        ]
        rows.append((stage, *cells))
    print(report.table(("bytes per parameter over the model", "fresh", "resumed"), rows))
    report.finish("memory", facts, {"fresh": fresh, "resumed": resumed}, args.json)


if __name__ == "__main__":
    main()
