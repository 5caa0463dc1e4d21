"""Items of clients, and the requests that carry them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from .limits import Outcome, Permit


@dataclass(eq=False, slots=True)
class Item:
    """One prompt or text."""

    content: Any
    """Messages of a chat, or a text."""
    tokens: int
    """Estimated tokens of the content."""
    most_tokens: int | None
    """Most tokens of the answer, if they are known."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of its requests."""
    given_up: bool = False
    """Whether no caller waits for the item any more."""
    work: tuple[Sequence[Item], asyncio.Task[Any]] | None = None
    """The task that gets its result, and all items of that task."""

    def give_up(self) -> None:
        """Note that no caller waits any more, and end the task once that is true of all items."""
        self.given_up = True
        if self.work is not None and all(each.given_up for each in self.work[0]):
            self.work[1].cancel()


@dataclass(eq=False, slots=True)
class Request:
    """Items that are sent together, again until they have results or fail."""

    session: Any
    items: list[Item]
    since: float
    """Moment at which the wait began, or of the first refusal (s)."""
    refused: bool = False
    """Whether a refusal was the reason for the wait."""
    corrected: bool = False
    """Whether the model was asked to correct its JSON."""
    sendings: int = 0
    attempts: int = 0
    """Failed sendings that count."""
    sent: float = inf
    """Moment of the last sending (s)."""
    last: float = inf
    """Moment of the sending before (s)."""
    turn: Any = None
    """Future of the moment of sending; an exception, if it may not be sent."""
    permit: Permit | None = None
    """Permit of the present sending."""
    cost: float = 0.0
    """Estimated cost of a sending."""


@dataclass(slots=True)
class Reply:
    """End of one sending."""

    outcome: Outcome
    results: Sequence[Any] = ()
    error: BaseException | None = None
    """Reason why there are no results."""
    why: str = ""
    """Description of `error` for messages."""
    again: bool = False
    """Whether another sending may have results."""
    request_id: str | None = None
    status: int | None = None
    pause: float | None = None
    """Pause that the service asks for (s)."""
    text: str | None = None
    """JSON that the model could correct."""
    tokens: int | None = None
    """Tokens that it took; None: unknown."""
    cost: float | None = None
    """Cost; None: unknown, so that the estimate counts."""

    @property
    def is_fault(self) -> bool:
        """Whether the service is at fault."""
        return self.outcome in ("refusal", "failure", "time limit")
