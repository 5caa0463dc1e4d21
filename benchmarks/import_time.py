"""How long does `import batched` take? Each run is a fresh interpreter, which times the import
alone.

Run: python benchmarks/import_time.py [--check] [--quick] [--save]
"""

from __future__ import annotations

import subprocess
import sys

from report import Figure, conclude, options, repeated

CODE = "import time; start = time.perf_counter(); import {0}; print(time.perf_counter() - start)"


def import_of(module: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(module)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    arguments = options(__doc__ or "")
    runs = 3 if arguments.quick else 9
    conclude(
        [
            Figure("import batched", repeated(lambda: import_of("batched"), runs), "s", 0.1),
            Figure("of which import asyncio", repeated(lambda: import_of("asyncio"), runs), "s"),
        ],
        arguments,
    )


if __name__ == "__main__":
    main()
