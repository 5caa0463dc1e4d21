"""How much of a real model's full throughput do callers with one sentence each get?

Run: python benchmarks/embeddings.py [--check] [--quick] [--save]

The model is all-MiniLM-L6-v2 on the CPU; sentences are of mixed length, `batch_size` is 32, ours is
told `length=len`, and the rest is left at its defaults. Throughput is a share of one direct
`model.encode` of all sentences, sorted by length, 32 at once, in the same process, right before and
after.
"""

from __future__ import annotations

import argparse
from typing import Any

from batched._demo import first_sentences
from contest import ROUNDS, Found, Question, contest
from peers import OURS_BY_LENGTH, PEERS, Peer, compared, without
from pictures import Panel
from report import Figure, conclude, options

SENTENCES, QUICK_SENTENCES = 1000, 160
THREADS, COROUTINES = 128, 1000
BATCH_SIZE = 32
LEAST_SHARE = 0.95
"""Of the direct call: ours, from threads and from coroutines. A quick run, mostly start and end, is
not held to it.
"""
ALONE = "one by one, without batching"


def questions(
    peer: Peer, settings: dict[str, Any], arguments: argparse.Namespace
) -> list[Question]:
    """All that one row is asked."""
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
    if peer is OURS_BY_LENGTH:
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
    """Shares, ours with bounds, then sentences per second."""
    made = []
    order = ("share", "rate", "direct")
    for (asked, row, name), runs in sorted(
        found.runs.items(), key=lambda item: (order.index(item[0][2]), item[0][0] == ALONE)
    ):
        label = asked if asked == ALONE else f"{row}, {asked}"
        bounded = name == "share" and row == OURS_BY_LENGTH.name and asked != ALONE
        if name == "share":
            made.append(Figure(label, runs, "of direct", at_least=least_share if bounded else None))
        elif name == "rate":
            made.append(Figure(label, runs, "sentences/s"))
    direct = [run for (_, _, name), runs in found.runs.items() if name == "direct" for run in runs]
    return (
        [*made, Figure("direct, sorted by length, all processes", direct, "sentences/s")]
        if direct
        else made
    )


def panels(made: list[Figure]) -> list[Panel]:
    """Throughput, the best first."""
    ordered = sorted(
        (figure for figure in made if figure.unit == "sentences/s"),
        key=lambda figure: -figure.median,
    )
    bars = {figure.name: [figure.median] for figure in ordered}
    shares = sorted(
        (figure for figure in made if figure.unit == "of direct"), key=lambda figure: -figure.median
    )
    bounds = {figure.name: figure.at_least for figure in shares if figure.at_least is not None}
    return [
        Panel(
            "share of one direct, sorted call (more is better)",
            {figure.name: [figure.median] for figure in shares},
            bounds=bounds,
        ),
        Panel("sentences a second (more is better)", bars),
    ]


def main() -> None:
    arguments = options(__doc__ or "")
    rounds = 1 if arguments.quick else 5
    found = contest(
        lambda peer, settings: questions(peer, settings, arguments),
        rounds,
        ours=(OURS_BY_LENGTH,),
        peers=compared(quick=arguments.quick),
    )
    made = figures(found, None if arguments.quick else LEAST_SHARE)
    conclude(
        made,
        arguments,
        ("torch", "sentence-transformers", "transformers"),
        versions=found.versions,
        missing=without(quick=arguments.quick, threads=True) | found.missing,
        notes=[
            ROUNDS.format(rounds),
            *(f"{peer.name}: {peer.driven}." for peer in (OURS_BY_LENGTH, *PEERS)),
        ],
        panels=panels(made),
    )


if __name__ == "__main__":
    main()
