"""How much of a real model's full throughput do callers with one sentence each get?

Run: python benchmarks/embeddings.py [--check] [--quick] [--save]

The model is all-MiniLM-L6-v2 on the CPU, and sentences have mixed lengths. `batch_size` is 32, ours
has `length=len`, and all other settings have their defaults. The baseline is one direct
`model.encode` of all sentences, sorted by length, 32 at once, in the same process, right before and
after.
"""

from __future__ import annotations

import argparse
from typing import Any

from batched._commands.demo import first_sentences
from contest import ROUNDS, Found, Question, contest
from peers import OURS_BY_LENGTH, QUEUE, Peer, compared, without
from pictures import Panel
from report import Figure, Result, conclude, options

SENTENCES, QUICK_SENTENCES = 1000, 160
THREADS, COROUTINES = 128, 1000
BATCH_SIZE = 32
LEAST_SHARE = 0.85
"""Least share of the direct call, from threads and coroutines. Quick runs have no bound."""
WHY = (
    "The bound is 0.85: a batch takes like lengths from the calls that wait, the direct call from "
    "all sentences; and equal direct calls, one after the other, differ by up to a tenth."
)
ALONE = "one by one, without batching"


def questions(
    peer: Peer, settings: dict[str, Any], arguments: argparse.Namespace
) -> list[Question]:
    """Return all questions of one row."""
    sentences = first_sentences()[: QUICK_SENTENCES if arguments.quick else SENTENCES]
    kinds = [("coroutines", COROUTINES)] + ([("threads", THREADS)] if peer.threads else [])
    asked: list[Question] = [
        {
            "question": f"embeddings, {kind}",
            "title": kind,
            "callers": min(callers, len(sentences)),
            "sentences": sentences,
            "batch_size": BATCH_SIZE,
            "settings": settings,
        }
        for kind, callers in kinds
    ]
    if peer is OURS_BY_LENGTH and not arguments.check:
        asked.append(
            {
                "question": "embeddings, one by one",
                "title": ALONE,
                "sentences": sentences,
                "batch_size": BATCH_SIZE,
            }
        )
    return asked


def figures(found: Found, least_share: float | None) -> list[Figure]:
    """Return sentences per second relative to the direct call, ours with bounds."""
    return [
        Figure(
            asked if asked == ALONE else f"{row}, {asked}",
            found.runs[asked, row, "rate"],
            "sentences/s",
            Figure("direct", found.runs[asked, row, "direct"], "sentences/s"),
            at_least=least_share if row == OURS_BY_LENGTH.name and asked != ALONE else None,
        )
        for asked, row in dict.fromkeys((asked, row) for asked, row, _ in found.runs)
    ]


def panels(made: list[Figure]) -> list[Panel]:
    """Return shares and throughput, the best first."""
    shares = sorted(((figure.ratio or 0.0, figure.name) for figure in made), reverse=True)
    rates = sorted(((figure.median, figure.name) for figure in made), reverse=True)
    return [
        Panel(
            "share of one direct, sorted call (more is better)",
            {name: [share] for share, name in shares},
        ),
        Panel("sentences a second (more is better)", {name: [rate] for rate, name in rates}),
    ]


def measured(arguments: argparse.Namespace) -> Result:
    rounds = 1 if arguments.quick else 5
    found = contest(
        lambda peer, settings: questions(peer, settings, arguments),
        rounds,
        ours=(OURS_BY_LENGTH, QUEUE),
        peers=compared(arguments),
        rounds_of_peers=3,
    )
    made = figures(found, None if arguments.quick else LEAST_SHARE)
    return Result(
        made,
        ("torch", "sentence-transformers", "transformers"),
        versions=found.versions,
        missing=without(arguments, threads=True) | found.missing,
        notes=[
            ROUNDS.format(f"{rounds}, or 3 of peers"),
            WHY,
            *(
                f"{peer.name}: {peer.driven}."
                for peer in (OURS_BY_LENGTH, QUEUE, *compared(arguments))
            ),
        ],
        panels=panels(made),
    )


def main() -> None:
    arguments = options(__doc__ or "")
    conclude(lambda: measured(arguments), arguments)


if __name__ == "__main__":
    main()
