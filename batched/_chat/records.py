"""Records of clients: counts of requests, and answers with details."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    U = TypeVar("U", default=str)
else:
    from typing import TypeVar

    U = TypeVar("U")


@dataclass(frozen=True)
class Usage:
    """A snapshot of the requests of a client since it was made, and of its service's limits now."""

    requests: int
    """Requests sent, with any outcome."""
    retries: int
    """Requests that repeated another one."""
    prompt_tokens: int
    """Tokens of prompts or texts, as the service counted them."""
    completion_tokens: int
    """Tokens of all answers, usable or not, as the service counted them."""
    cost: float | None
    """Cost by `prices`, estimated where the service told no tokens; None without `prices`."""
    limit: int
    """Requests that may run at once now."""
    paused_s: float
    """Time for which no request is sent, because the service asked for a pause (s)."""
    is_open: bool
    """State of the circuit breaker; open: the service seems to be down."""


@dataclass(frozen=True)
class ChatAnswer(Generic[U]):
    """The result of a prompt, with details of the answer."""

    result: U
    """Text, or instance of the schema."""
    was_cut: bool
    """Whether the answer ended at the most tokens that it may have (`max_tokens`)."""
    prompt_tokens: int | None
    """Tokens of the prompt; None: the service did not count them."""
    completion_tokens: int | None
    """Tokens of the answer; None: the service did not count them."""
    request_id: str | None
    """The service's own id of the request."""
