"""How much time do collating rows to a padded batch and splitting the output take, compared with
`pad_sequence` over the same rows?

Run: python benchmarks/collate.py [--check] [--quick] [--save]
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from batched._collate.arguments import Arguments
from batched._collate.features.collate import FeatureCollator
from batched._collate.features.devices import Devices
from batched._collate.features.parse import FeatureParser
from batched._collate.features.settings import FeatureSettings
from batched._core.scheduler import Batch, Request, Slice
from report import Figure, Result, conclude, options

CALLS = 64
TOKENS = 128
REPEATS = 50

Calls = Sequence[dict[str, torch.Tensor]]
Step = Callable[[], object]

SEEN = 8
"""Calls of one row each, from which the collator learns the axes to cut before the measurement."""


def rows(*, ragged: bool, names: Sequence[str] = ("input_ids",)) -> Calls:
    """Return calls of one row with 128 tokens or, if `ragged`, with 5 to 128."""
    chance = random.Random(0)
    lengths = [chance.randint(5, TOKENS) if ragged else TOKENS for _ in range(CALLS)]
    return [{name: torch.randint(1, 30_000, (1, length)) for name in names} for length in lengths]


def requests(calls: Calls) -> list[Slice]:
    parser = FeatureParser("fn", FeatureSettings(), None, Devices(None, None))
    arguments = Arguments((), {})
    read = [parser.parse(call) for call in calls]
    return [
        (Request(features, 1, features.spec.group(arguments), waker=None), 0, 1)
        for features in read
    ]


def collated(calls: Calls) -> Step:
    """Return the step from requests to the argument of the function."""
    slices, settings = requests(calls), FeatureSettings(unpad=False)
    collator = FeatureCollator("fn", settings, set())
    return lambda: collator.collate(slices, Batch(slices, CALLS, "full", 0.0))


def read(calls: Calls) -> Step:
    """Return the step from the arguments of callers to requests, which each caller does in its
    thread.
    """
    return lambda: requests(calls)


def split(calls: Calls, hidden: int) -> Step:
    """Return the step from an output to the results of callers, each cut to its own length. The
    output has a vector per token, or per row.
    """
    collator, slices = FeatureCollator("fn", FeatureSettings(), set()), requests(calls)

    def output(rows: int, width: int) -> torch.Tensor:
        return torch.ones(rows, width, hidden)

    for one in sorted(slices, key=lambda each: each[0].items.widths)[:SEEN]:  # the shortest first
        alone = collator.collate([one], Batch([one], 1, "full", 0.0))
        collator.split(output(*alone[0][0]["input_ids"].shape), [one], alone[2])
    call = collator.collate(slices, Batch(slices, CALLS, "full", 0.0))
    whole = output(*call[0][0]["input_ids"].shape)
    return lambda: collator.split(whole, slices, call[2])


def padded(calls: Calls) -> Step:
    """Return the baseline of collating: torch pads a list of the rows."""
    lists = [[call[name][0] for call in calls] for name in calls[0]]
    return lambda: [pad_sequence(each, batch_first=True) for each in lists]


def copied(calls: Calls, hidden: int) -> Step:
    """Return the baseline of splitting: a slice and a copy for each call."""
    widths = [call["input_ids"].shape[1] for call in calls]
    whole = torch.ones(CALLS, max(widths), hidden)
    return lambda: [
        whole[number : number + 1, :width].clone() for number, width in enumerate(widths)
    ]


def touched(calls: Calls) -> Step:
    """Return the baseline of parsing: the least that must be read of each row."""
    return lambda: [
        [(name, row.shape, row.dtype, row.device) for name, row in call.items()] for call in calls
    ]


def timed(step: Step) -> float:
    """Return the CPU time of a step (us)."""
    start = time.process_time()
    for _ in range(REPEATS):
        step()
    return (time.process_time() - start) / REPEATS * 1e6


def measured(rounds: int) -> Result:
    torch.set_num_threads(1)
    even, ragged = rows(ragged=False), rows(ragged=True)
    many = rows(ragged=True, names=("input_ids", "attention_mask", "token_type_ids"))
    steps: dict[str, tuple[Step, str, Step, float]] = {
        f"collate {CALLS} calls of {TOKENS} tokens": (
            *(collated(even), "pad_sequence", padded(even), 0.75),
        ),
        "collate, 5 to 128 tokens": (collated(ragged), "pad_sequence", padded(ragged), 0.9),
        "collate, three features": (collated(many), "pad_sequence", padded(many), 0.65),
        "split 5 to 128 tokens of 384 numbers": (
            *(split(ragged, 384), "slices and copies", copied(ragged, 384), 1.9),
        ),
        f"read {CALLS} calls of one feature": (read(ragged), "bare reading", touched(ragged), 18.5),
        f"read {CALLS} calls of three features": (read(many), "bare reading", touched(many), 18.5),
    }
    runs: dict[str, list[float]] = {name: [] for name in steps}
    floors: dict[str, list[float]] = {name: [] for name in steps}
    for counts in [False] + [True] * rounds:  # one round does not count
        for name, (step, _, floor, _) in steps.items():
            found = timed(step), timed(floor)
            if counts:
                runs[name].append(found[0])
                floors[name].append(found[1])
    return Result(
        [
            Figure(name, runs[name], "us", Figure(of, floors[name], "us"), at_most=bound)
            for name, (_, of, _, bound) in steps.items()
        ],
        ("torch", "numpy"),
    )


def main() -> None:
    arguments = options(__doc__ or "")
    conclude(lambda: measured(7 if arguments.quick else 21), arguments)


if __name__ == "__main__":
    main()
