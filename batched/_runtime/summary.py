"""Counts of batches, and the statistics that are made of them.

A count has the name of a metric or, if the metric has labels, the value of the label; two are no
metrics, `places` and `processing`, a sum of seconds. A pair is a histogram's name and one of its
values: a size, or a duration (s).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, get_args

from .._core.linger import FlushReason
from ..stats import Percentiles, Stats

Ending = Literal["cancelled", "lost", "timed_out", "rejected"]
"""End of a call without a batch: see the fields of `Stats`."""

REASONS: Final = get_args(FlushReason)
FAILURES: Final = get_args(Ending)
ROW_ENDINGS: Final = "finished", "failed", "given up"


ENDS: Final = [2 ** (end / 64) for end in range(-20 * 64, 40 * 64)]
"""Ends of the buckets of durations, each 1.1 % wide, from a microsecond on (s)."""
MIDDLE: Final = 2 ** (-1 / 128)
"""Middle of a bucket as a share of its end."""

EndedBatch = tuple[int, float, int, int, int, int, FlushReason, Sequence[float]]
"""Ended batch: its size, duration (s), failed calls, cells, cells of padding, calls of the function
that ran out of memory, flush reason, and waits of its calls (s).
"""
_SUMS: Final = "items", "processing", "error", "tokens", "padding_tokens", "memory_errors"
"""Counts that are sums of the first numbers of ended batches."""


def count_batches(ended: Sequence[EndedBatch]) -> dict[Any, Any]:
    """Return the counts of batches."""
    if not ended:
        return {}
    *numbers, reasons, waits = zip(*ended, strict=True)
    counts: Counter[Any] = Counter(reasons)
    counts.update(zip(itertools.repeat("batch_size"), numbers[0], strict=False))
    sums = {name: total for name, of in zip(_SUMS, numbers, strict=True) if (total := sum(of))}
    durations = count_durations("processing_seconds", numbers[1])
    of_calls = count_durations("queue_wait_seconds", [*itertools.chain(*waits)])
    return {**sums, **counts, **durations, **of_calls}


def count_durations(name: str, durations: Sequence[float]) -> dict[Any, int]:
    """Return the counts of a histogram of durations. Similar durations take only a few look-ups."""
    ordered, counts, low = sorted(durations), {}, 0
    while low < len(ordered):
        end = ENDS[bisect_left(ENDS, ordered[low])]
        high = bisect_right(ordered, end, low)
        counts[name, end * MIDDLE] = high - low
        low = high
    return counts


def make_stats(counts: Counter[Any], *load: Any) -> Stats:
    """Return the snapshot of `counts`, and of the present load: the first fields of `Stats`."""
    histograms: defaultdict[str, dict[Any, int]] = defaultdict(dict)
    for name, value in sorted([key for key in counts if isinstance(key, tuple)]):
        histograms[name][value] = counts[name, value]
    items, batches = counts["items"], sum(histograms["batch_size"].values())
    fields: dict[str, Any] = {
        **{name: counts[name] for name in ("calls", "memory_errors", "steps", *FAILURES)},
        "total_processed": items,
        "total_batches": batches,
        "avg_batch_size": items / (batches or 1),
        "avg_processing_time": counts["processing"] / (batches or 1),
        "errors": counts["error"],
        "queue_wait": _percentiles(histograms["queue_wait_seconds"]),
        "processing_time": _percentiles(histograms["processing_seconds"]),
        "padding_waste": counts["padding_tokens"] / (counts["tokens"] or 1),
        "batch_sizes": histograms["batch_size"],
        "flush_reasons": {each: counts[each] for each in REASONS if counts[each]},
        "rows_per_step": counts["live_rows"] / (counts["steps"] or 1),
        "places_filled": counts["live_rows"] / (counts["places"] or 1),
        "row_endings": {each: counts[each] for each in ROW_ENDINGS if counts[each]},
    }
    return Stats(*load, **fields)


def _percentiles(histogram: Mapping[float, int]) -> Percentiles:
    """Return the shortest durations that are not exceeded by their shares of all durations."""
    totals = list(itertools.accumulate(histogram.values()))
    ranks = [bisect_left(totals, share * totals[-1]) for share in (0.50, 0.95, 0.99) if totals]
    return Percentiles(*[[*histogram][rank] for rank in ranks] or [0.0] * 3)
