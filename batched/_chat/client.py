"""ChatClient: a chat service that is called like any batched function."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, SupportsIndex, overload

from .._function.batched import Batched
from .._function.function import BatchFunction
from .._function.settings import Options
from .._services.prompts import Prompt

if TYPE_CHECKING:
    from typing import Self

    from typing_extensions import TypeVar

    from .questions import Question

    U = TypeVar("U", default=str)
else:
    from typing import TypeVar

    U = TypeVar("U")

P = TypeVar("P", bound=Prompt)

MILLION: Final = 1_000_000
"""Tokens to which prices apply."""

OF_FUNCTION: Final = ("name", "max_queue_size", "on_full", "queue_timeout_ms", "on_batch")
"""Settings of every batched function that a client has, too."""

SECRET: Final = "extra_headers"
"""Parameter that may hold a key."""


@dataclass(frozen=True)
class ChatUsage:
    """A snapshot of the requests of a client since it was made, and of its limits now."""

    requests: int
    """Requests sent, with any outcome."""
    retries: int
    """Requests that repeated another one."""
    prompt_tokens: int
    """Tokens of prompts, as the service counted them."""
    completion_tokens: int
    """Tokens of all answers, usable or not, as the service counted them."""
    cost: float | None
    """Cost of these tokens by `prices`; None without `prices`."""
    limit: int
    """Requests that may run at once now."""
    paused_s: float
    """Time for which no request is sent, because the service asked for a pause (s)."""
    is_open: bool
    """State of the circuit breaker; open: the service seems to be down."""


class ChatClient(Batched[Prompt, U, ...], Generic[U]):
    """A client of a hosted or local chat service that speaks OpenAI's protocol.

    `client(prompt)` returns the text of the answer or, with `schema`, an instance of that pydantic
    class. A prompt is a text, or a list of messages. All callers, in threads and on event loops,
    share one set of limits. The client adapts the number of requests at once to the service, and a
    pause that the service asks for applies to all requests. Further keywords are parameters of chat
    completions, or settings of `batched.dynamically` for the queue: `max_queue_size`, `on_full`,
    `queue_timeout_ms`, `on_batch`, `name`.

    Args:
        base_url: address of the service, for example `http://localhost:8000/v1`.
        model: name of the model there.
        schema: pydantic class of the results; None: results are texts.
        max_workers: most requests at once.
        api_key: key of the service; None: `OPENAI_API_KEY` of the environment.
        system: system message before each prompt.
        timeout_s: longest time of one request, to its last byte.
        attempts: most requests for one prompt that fail by themselves.
        max_wait_s: longest wait of a call for a service that refuses it, or answers no request.
        requests_per_minute, tokens_per_minute: budgets in any 60 seconds.
        prices: prices of a million tokens of prompts, and of answers, for `usage.cost`.

    Raises:
        TypeError, ValueError: a setting is unknown, of the wrong type, or out of its range.
        ImportError: the `openai` client is not installed.
    """

    retries_itself: Final = True
    """After a fault of the service, a second call would only repeat the retries of the first."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        schema: type[U] | None = None,
        max_workers: int = 30,
        api_key: str | None = None,
        system: str | None = None,
        timeout_s: float = 60.0,
        attempts: int = 5,
        max_wait_s: float = 600.0,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        prices: tuple[float, float] | None = None,
        **parameters: Any,
    ) -> None:
        try:  # not before the first client
            from pydantic import ValidationError

            from .questions import ChatPreparation
            from .session import Session
            from .settings import ChatSettings, first_error
        except ImportError as error:
            raise ImportError(
                'ChatClient needs the openai client: pip install "batched-dynamically[chat]"'
            ) from error
        try:
            settings = ChatSettings(
                base_url=base_url,
                model=model,
                schema=schema,  # type: ignore[arg-type]  # pydantic checks its base class
                max_workers=max_workers,
                api_key=api_key,
                system=system,
                timeout_s=timeout_s,
                attempts=attempts,
                max_wait_s=max_wait_s,
                requests_per_minute=requests_per_minute,
                tokens_per_minute=tokens_per_minute,
                prices=prices,
            )
        except ValidationError as error:
            raise ValueError(first_error(error)) from None
        self._settings = settings
        self._arguments = vars(settings) | parameters
        of_function: dict[str, Any] = {
            name: parameters.pop(name) for name in OF_FUNCTION if name in parameters
        }
        self._parameters = parameters
        of_function["name"] = name = of_function.get("name") or model
        one_by_one = {"batch_size": 1, "flush": "eager", "max_concurrent_batches": max_workers}
        options = Options().updated(one_by_one | of_function)
        preparation = ChatPreparation(name, settings, parameters, {*vars(settings), *OF_FUNCTION})
        sessions: dict[int, Session] = {}  # by process

        def session() -> Session:
            """Return the session in this process: a child of a fork has a session of its own."""
            process = os.getpid()
            return sessions.get(process) or sessions.setdefault(process, Session(name, settings))

        def ask(prompts: list[Question]) -> list[Any]:
            return [session().ask(prompt) for prompt in prompts]

        ask.__name__ = ask.__qualname__ = name
        ask.__doc__ = ChatClient.__doc__
        self._session = session
        super().__init__(BatchFunction(ask, "static", False, options, preparation=preparation))

    if TYPE_CHECKING:
        # a list of prompts may hold texts only, or chats only

        @overload
        def __call__(self, prompts: list[P], /, **parameters: Any) -> list[U]: ...
        @overload
        def __call__(self, prompt: Prompt, /, **parameters: Any) -> U: ...
        def __call__(self, prompt: Any, /, **parameters: Any) -> Any: ...

        @overload
        async def acall(self, prompts: list[P], /, **parameters: Any) -> list[U]: ...
        @overload
        async def acall(self, prompt: Prompt, /, **parameters: Any) -> U: ...
        async def acall(self, prompt: Any, /, **parameters: Any) -> Any: ...

    @property
    def usage(self) -> ChatUsage:
        """Frozen snapshot of the requests since the client was made, and of its limits now."""
        session, prices = self._session(), self._settings.prices
        counts, limits = session.counts, session.limits
        cost = None
        if prices is not None:
            cost = prices[0] * counts.prompt_tokens + prices[1] * counts.completion_tokens
            cost /= MILLION
        return ChatUsage(
            **vars(counts),
            cost=cost,
            limit=limits.limit,
            paused_s=max(0.0, limits.held_until - perf_counter()),
            is_open=limits.open_until is not None,
        )

    @property
    def options(self) -> Mapping[str, Any]:
        """Settings and parameters of this client by name, read-only; all but the key."""
        return MappingProxyType(
            {name: value for name, value in self._arguments.items() if name != "api_key"}
        )

    @property
    def meaning(self) -> str:
        """Basis of the answers, as JSON: model, system message, schema and parameters."""
        settings = self._settings
        schema: Any = settings.schema
        meaning = {
            "model": settings.model,
            "system": settings.system,
            "schema": None if schema is None else schema.model_json_schema(),
            "parameters": {
                name: value for name, value in self._parameters.items() if name != SECRET
            },
        }
        return json.dumps(meaning, sort_keys=True, default=lambda value: type(value).__name__)

    def with_options(self, **changes: Any) -> Self:
        """Return the same client with other settings or parameters.

        The new client has a queue and limits of its own.

        Raises:
            TypeError, ValueError: a setting is unknown, of the wrong type, or out of its range.
        """
        return type(self)(**self._arguments | changes)

    def __reduce_ex__(self, _: SupportsIndex) -> tuple[Any, ...]:
        return functools.partial(type(self), **self._arguments), ()

    def __repr__(self) -> str:
        return f"<ChatClient of {self._settings.model} at {self._settings.base_url}>"
