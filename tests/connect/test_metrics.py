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
        import batched.metrics
        from prometheus_client import CollectorRegistry
        from prometheus_client.multiprocess import MultiProcessCollector

        counted = batched.connect("served_metrics:counted", linger_s=1)
        registry = CollectorRegistry()
        batched.metrics.prometheus(registry=registry)
        MultiProcessCollector(registry)
        for number in range(7):
            assert counted(number) == number

        def value(name, **labels):
            return registry.get_sample_value(name, labels)

        for _ in range(1000):  # the model process writes its counts a moment later
            if value("batched_items_total", function="counted") == 7:
                print("found", value("batched_calls_total", function="served_metrics:counted"))
                break
            time.sleep(0.01)
        """
    )
    assert (ended.stdout, ended.stderr) == ("found 7.0\n", "")
