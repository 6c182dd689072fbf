"""Records what pictures.py draws: one step's buckets, and one ring all-reduce.

buckets.json: the middle step of a GPT of two ranks, a core each, on the clock of rank 0. ring.json:
sender and receiver of each chunk at each step, of four ranks. Once recorded they are drawn by
`make manifests`; the picture of scaling is drawn from studies/scaling.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from findings import launches
from harness import report


def rounded(found: Any) -> Any:
    """Seconds to the microsecond."""
    return json.loads(json.dumps(found), parse_float=lambda text: round(float(text), 6))


def main() -> None:
    parser = report.options(__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="of steps to take one from")
    parser.add_argument(
        "--into",
        type=Path,
        metavar="DIR",
        default=report.RESULTS,
        help="studies for the pages",
    )
    args = parser.parse_args()
    machine = report.machine()
    seconds = "0.1" if args.quick else str(args.seconds)
    [step, *_], ring = launches.one_after_another(
        [
            (2, "phases.py", ["--record", "--workloads", "gpt", "--seconds", seconds]),
            (4, "ring.py", []),
        ]
    )
    args.into.mkdir(parents=True, exist_ok=True)
    for name, found in (("buckets", {"ranks": 2, **rounded(step)}), ("ring", ring)):
        path = args.into / f"{name}.json"
        path.write_text(json.dumps({"machine": machine, **found}, indent=1) + "\n")
        print(path)
    done = [1000 * bucket["done"] for bucket in step["buckets"]]
    rows = [
        (number, bucket["bytes"], f"{1000 * bucket['ready']:.1f}", f"{end:.1f}")
        for number, (bucket, end) in enumerate(zip(step["buckets"], done, strict=True))
    ]
    print(report.table(("bucket", "bytes", "ready ms", "reduced ms"), rows))


if __name__ == "__main__":
    main()
