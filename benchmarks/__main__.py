"""All benchmarks, one after the other: `python benchmarks [--check] [--quick] [--save]`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from report import options

HERE = Path(__file__).parent
QUESTIONS = (
    *("overhead", "policy"),
    *("closed_loop", "open_loop", "embeddings", "generation", "offline"),
    *("clusters", "processes", "http_server", "gpu"),
)
"""Files that ask them, quickest first."""


def main() -> None:
    arguments = options(__doc__ or "")
    chosen = [f"--{name}" for name, wanted in vars(arguments).items() if wanted]
    failed = []
    for name in QUESTIONS:
        print(f"\n== {name}", flush=True)
        if subprocess.run([sys.executable, HERE / f"{name}.py", *chosen]).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed, or missed a bound: {', '.join(failed)}")


if __name__ == "__main__":
    main()
