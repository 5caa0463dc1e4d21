"""Items of clients, and the requests that carry them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from .limits import Outcome, Permit


@dataclass(eq=False, slots=True)
class Item:
    """One prompt or text, from its call to its outcome."""

    content: Any
    """Messages of a chat, or a text."""
    tokens: int
    """Estimated tokens of the content."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of its requests."""
    most_tokens: int | None = None
    """Limit of the tokens of the answer; None: unlimited."""
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Source of the idempotency key of its requests."""
    session: Any = None
    """Session of the client."""
    future: Any = None
    """Future of the outcome; None before the item has begun."""
    given_up: bool = False
    """Whether no caller waits for the item any more."""
    since: float = 0.0
    """Moment at which the wait began, or of the first refusal (s)."""
    refused: bool = False
    """Whether a refusal was the reason for the wait."""
    requests: int = 0
    """Requests that were sent with the item."""
    attempts: int = 0
    """Failed requests that count."""
    sent: float = inf
    """Moment of its last request (s)."""
    last: float = inf
    """Moment of the request before (s)."""
    round: int = 0
    """Failures in turn of the service before the item."""
    corrected: bool = False
    """Whether the model was asked to correct its JSON."""
    part: Part | None = None
    """Items that were in a failed request together; None: the item may join any other item."""
    request: Request | None = None
    """Running request with the item."""

    @property
    def is_open(self) -> bool:
        """Whether a caller waits for the outcome."""
        return self.future is not None and not self.future.done()

    def give_up(self) -> None:
        """Note that no caller waits any more."""
        self.given_up = True
        if self.future is not None:
            self.future.cancel()


@dataclass(eq=False, slots=True)
class Part:
    """Half of the items of a failed request, which is sent alone."""

    items: list[Item]
    rest: list[Item]
    """The other half, which waits for the outcome of this half."""


@dataclass(eq=False, slots=True)
class Request:
    """One running request."""

    items: list[Item]
    permit: Permit
    cost: float
    """Estimated cost."""
    task: Any = None


@dataclass(slots=True)
class Reply:
    """End of one request."""

    outcome: Outcome
    results: Sequence[Any] = ()
    error: BaseException | None = None
    """Reason why there are no results."""
    why: str = ""
    """Description of `error` for messages."""
    again: bool = False
    """Whether another request may have results."""
    request_id: str | None = None
    status: int | None = None
    pause: float | None = None
    """Pause that the service asks for (s)."""
    text: str | None = None
    """JSON that the model could correct."""
    tokens: int | None = None
    """Tokens that the request took; None: unknown."""
    cost: float | None = None
    """Cost of the request; None: unknown, so that the estimate counts."""

    @property
    def is_fault(self) -> bool:
        """Whether the service is at fault."""
        return self.outcome in ("refusal", "failure", "time limit")
