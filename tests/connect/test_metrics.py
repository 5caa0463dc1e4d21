"""Metrics of a model process, on one page with the metrics of its clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from stage import python


def test_metrics_of_the_process_are_on_the_page_of_a_client(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("prometheus_client")
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    ended = python(
        """
        import time
        import batched
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector

        counted = batched.connect("served_metrics:counted", linger_s=1)
        for number in range(7):
            assert counted(number) == number
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        wanted = 'batched_items_total{function="counted"} 7.0'
        for _ in range(1000):  # the observer is called after the callers are answered
            if wanted in generate_latest(registry).decode():
                print("found")
                break
            time.sleep(0.01)
        """
    )
    assert (ended.stdout, ended.stderr) == ("found\n", "")
