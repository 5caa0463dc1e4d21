"""The page of model processes: its two files serve requests from several workers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from served import environment

from stage import BOUND, wait_until

PAGE = Path(__file__).parents[2] / "docs" / "processes.md"


@pytest.mark.once
@pytest.mark.timeout(120)
def test_the_files_of_the_page_share_one_model_among_workers(folder: Path, tmp_path: Path) -> None:
    for package in ("fastapi", "uvicorn"):
        pytest.importorskip(package)
    model, app = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    note = "import os\nopen('built.txt', 'a').write(f'{os.getpid()}\\n')\n"
    (tmp_path / "my_model.py").write_text(note + model)
    (tmp_path / "app.py").write_text(app.replace('on_full="raise"', 'on_full="raise", linger_s=1'))
    log, built = tmp_path / "log.txt", tmp_path / "built.txt"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "app:app", "--workers", "2", "--port", "0"],
            stderr=output,
            cwd=tmp_path,
            env=environment(),
        )
    try:
        wait_until(lambda: log.read_text().count("Application startup complete") == 2)
        port = re.findall(r"running on http://127.0.0.1:(\d+)", log.read_text())[0]

        def ask(number: int) -> int:
            """Return the status of an answer, which is right if it is no refusal."""
            try:
                url = f"http://127.0.0.1:{port}/shout/text{number}"
                with urllib.request.urlopen(url, timeout=BOUND) as answer:
                    assert answer.read() == b'"TEXT%d"' % number
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                with error:
                    return error.code

        with ThreadPoolExecutor(8) as threads:
            assert set(threads.map(ask, range(40))) == {200}
            assert len(built.read_text().split()) == 1
            statuses = threads.map(ask, range(100))
            os.kill(int(built.read_text()), signal.SIGTERM)
            assert set(statuses) <= {200, 503}
            wait_until(lambda: ask(0) == 200)
    finally:
        server.terminate()
        server.wait(BOUND)
    assert len(built.read_text().split()) == 2
    wait_until(lambda: not list(folder.iterdir()))
