"""Greenlets of gevent as callers, with gevent's patch before or after the import."""

from __future__ import annotations

import pytest

from stage import python

pytest.importorskip("gevent")

PATCH = "import gevent.monkey; gevent.monkey.patch_all(ssl=False)"
FUNCTIONS = """
def incremented(items):
    time.sleep(0)  # other greenlets run meanwhile
    return [item + 1 for item in items]

def decorated(**settings):
    return batched.dynamically(batch_size=8, **settings)(incremented)

several = [
    decorated(),
    decorated(max_concurrent_batches=2),
    decorated(max_queue_size=20, queue_timeout_ms=1e6),
]
held = decorated(queue_timeout_ms=5.0, flush="window", timeout_ms=1e9)
"""
ORDERS = {
    "patch first": [PATCH, "import batched", FUNCTIONS],
    "import first": ["import batched", PATCH, FUNCTIONS],
    "decoration first": ["import batched", FUNCTIONS, PATCH],
}


@pytest.mark.parametrize("order", ORDERS)
def test_greenlets_share_batches_and_waits_end_whichever_was_imported_first(order: str) -> None:
    done = python(
        "import time\n"
        + "\n".join(ORDERS[order])
        + """
import gevent

for fn in several:
    assert fn(1) == 2
    calls = [gevent.spawn(fn, i) for i in range(100)]
    gevent.joinall(calls, timeout=10, raise_error=True)
    assert [call.value for call in calls] == list(range(1, 101))
    assert fn.stats.total_batches <= 51
    assert list(fn.map(range(5))) == [1, 2, 3, 4, 5]
    assert fn.submit(3).result() == 4
    fn.shutdown()

try:
    held(1)
except batched.QueueTimeout:
    held.shutdown()
else:
    raise AssertionError
"""
    )
    assert done.returncode == 0, done.stderr
