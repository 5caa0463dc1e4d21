"""ChatClient: a chat service, called as any batched function."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, overload

from .._function.batched import Batched
from .._function.function import BatchFunction
from .._function.settings import Options
from .._services.prompts import Prompt
from .endpoint import Endpoint
from .questions import ChatPreparation, Question
from .session import Service

if TYPE_CHECKING:
    from typing import Self

    from typing_extensions import TypeVar

    U = TypeVar("U", default=str)
else:
    from typing import TypeVar

    U = TypeVar("U")

P = TypeVar("P", bound=Prompt)

MILLION: Final = 1_000_000
"""Tokens that prices are for."""

OF_FUNCTION: Final = ("name", "max_queue_size", "on_full", "queue_timeout_ms", "on_batch")
"""Settings that are those of every batched function."""

SECRET: Final = ("extra_headers",)
"""Parameters that may hold a key."""


@dataclass(frozen=True)
class ChatUsage:
    """A snapshot of what a client has asked for since it was made, and of its limits now."""

    requests: int
    """Requests that were sent, well answered or not."""
    retries: int
    """Of these, those that repeated another one."""
    prompt_tokens: int
    """Tokens of prompts, as the service counted them."""
    completion_tokens: int
    """Tokens of answers, likewise, of unusable ones too."""
    cost: float | None
    """Cost of these by `prices`; None without."""
    limit: int
    """Requests that may be under way at once now."""
    paused_s: float
    """Time for which no request is sent, because the service asked for that (s)."""
    is_open: bool
    """State of the circuit breaker; open: the service is down, as far as is known."""


class ChatClient(Batched[Prompt, U, ...], Generic[U]):
    """A client of a chat service that speaks OpenAI's protocol, hosted or local: `client(prompt)`
    is the text of its answer or, with `schema`, an instance of that pydantic class.

    A prompt is a text, or a list of messages. All callers, in threads and on event loops, share one
    set of limits: as many requests run at once as the service bears, and where it asks for a pause,
    all of them pause. Other keywords are parameters of chat completions, or settings of
    `batched.dynamically` for the queue: `max_queue_size`, `on_full`, `queue_timeout_ms`,
    `on_batch`, `name`.

    Args:
        base_url: address of the service, such as `http://localhost:8000/v1`.
        model: name of the model there.
        schema: pydantic class of the results; None: they are texts.
        max_workers: most requests at once.
        api_key: key of the service; None: `OPENAI_API_KEY` of the environment.
        system: what the model is told before each prompt.
        timeout_s: longest time of one request, to its last byte.
        attempts: most requests for one prompt that fail by themselves.
        max_wait_s: longest time that a call waits for a service that refuses it, or answers nobody.
        requests_per_minute, tokens_per_minute: budgets in any 60 seconds.
        prices: of a million tokens of prompts, and of answers, for `usage.cost`.

    Raises:
        TypeError, ValueError: a setting is unknown, of the wrong type, or out of its range.
        ImportError: the `openai` client is not installed.
    """

    retries_itself: Final = True
    """Calling it again after a fault of the service only repeats what it has done."""

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
        settings: dict[str, Any] = {
            "base_url": base_url,
            "model": model,
            "schema": schema,
            "max_workers": max_workers,
            "api_key": api_key,
            "system": system,
            "timeout_s": timeout_s,
            "attempts": attempts,
            "max_wait_s": max_wait_s,
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
            "prices": prices,
        }
        _check(settings)
        self._settings = MappingProxyType({**settings, **parameters})
        of_function: dict[str, Any] = {
            name: parameters.pop(name) for name in OF_FUNCTION if name in parameters
        }
        self._parameters = parameters
        of_function["name"] = of_function.get("name") or model
        one_by_one = {"batch_size": 1, "flush": "eager", "max_concurrent_batches": max_workers}
        options = Options().updated({**one_by_one, **of_function})
        service = Service(
            str(options.name),
            base_url,
            model,
            # a local server takes any, and the official client wants one
            api_key or os.environ.get("OPENAI_API_KEY") or "none",
            schema,
            None if schema is None else _response_format(schema),
            max_workers,
            timeout_s,
            attempts,
            max_wait_s,
            requests_per_minute,
            tokens_per_minute,
        )
        preparation = ChatPreparation(
            service.name,
            system,
            parameters,
            schema=schema is not None,
            settings=[*settings, *OF_FUNCTION],
        )
        self._endpoint = Endpoint(service)
        ask = _batch_function(self._endpoint)
        super().__init__(BatchFunction(ask, "static", False, options, preparation=preparation))

    if TYPE_CHECKING:
        # where a list holds prompts, it may be one of texts, or one of chats

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
        """Snapshot of what it has asked for since it was made, and of its limits now; frozen."""
        counts, limits = self._endpoint.counts, self._endpoint.limits
        prices: tuple[float, float] | None = self._settings["prices"]
        prompt, completion = counts.prompt_tokens, counts.completion_tokens
        return ChatUsage(
            requests=counts.requests,
            retries=counts.retries,
            prompt_tokens=prompt,
            completion_tokens=completion,
            cost=None
            if prices is None
            else (prices[0] * prompt + prices[1] * completion) / MILLION,
            limit=limits.limit,
            paused_s=max(0.0, limits.held_until - perf_counter()),
            is_open=limits.open_until is not None,
        )

    @property
    def options(self) -> Mapping[str, Any]:
        """The settings and parameters of this client by name, defaults too, but for the key;
        read-only.
        """
        return MappingProxyType(
            {name: value for name, value in self._settings.items() if name != "api_key"}
        )

    @property
    def meaning(self) -> str:
        """Basis of its answers, as JSON: model, system message, schema and parameters."""
        schema = self._settings["schema"]
        meaning = {
            "model": self._settings["model"],
            "system": self._settings["system"],
            "schema": None if schema is None else schema.model_json_schema(),
            "parameters": {
                name: value for name, value in self._parameters.items() if name not in SECRET
            },
        }
        return json.dumps(meaning, sort_keys=True, default=lambda value: type(value).__name__)

    def with_options(self, **changes: Any) -> Self:
        """The same client with other settings or parameters; it has a queue, a loop and limits of
        its own.

        Raises:
            TypeError, ValueError: a setting is unknown, of the wrong type, or out of its range.
        """
        return type(self)(**{**self._settings, **changes})

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        self._endpoint.close(wait=wait)

    async def aclose(self, *, cancel_futures: bool = False) -> None:
        await super().aclose(cancel_futures=cancel_futures)
        self._endpoint.close(wait=False)

    def __enter__(self) -> Self:
        self._endpoint.open()
        return super().__enter__()

    async def __aenter__(self) -> Self:
        self._endpoint.open()
        return await super().__aenter__()

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), **self._settings), ()

    def __repr__(self) -> str:
        return f"<ChatClient of {self._settings['model']} at {self._settings['base_url']}>"


def _batch_function(endpoint: Endpoint) -> Callable[[list[Question]], list[Any]]:
    """The batch function of a client, whose batches are of one."""

    def ask(prompts: list[Question]) -> list[Any]:
        return [endpoint.ask(prompt) for prompt in prompts]

    ask.__name__ = ask.__qualname__ = endpoint.service.name
    ask.__doc__ = ChatClient.__doc__
    return ask


def _response_format(schema: Any) -> dict[str, Any]:
    """How a service is asked for JSON that fits a pydantic class."""
    import openai

    # its schema as OpenAI wants it: every field required, no other ones
    function = openai.pydantic_function_tool(schema)["function"]
    return {
        "type": "json_schema",
        "json_schema": {
            "name": schema.__name__,
            "schema": function.get("parameters", {}),
            "strict": True,
        },
    }


def _check(settings: Mapping[str, Any]) -> None:
    """Raises an error that names the first setting that makes no sense, or what is missing."""
    try:
        import openai
        import pydantic
    except ImportError as error:
        raise ImportError(
            'ChatClient needs the openai client: pip install "batched-dynamically[chat]"'
        ) from error
    del openai
    url = settings["base_url"]
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise ValueError(f"base_url must be an address such as http://localhost:8000/v1, got {url}")
    for name, optional in (("model", False), ("api_key", True), ("system", True)):
        value = settings[name]
        if not (isinstance(value, str) and value) and not (optional and value is None):
            raise TypeError(f"{name} must be a text that is not empty, got {value!r}")
    schema = settings["schema"]
    if schema is not None and not (
        isinstance(schema, type) and issubclass(schema, pydantic.BaseModel)
    ):
        raise TypeError(f"schema must be a class of pydantic (BaseModel), got {schema!r:.60}")
    for name in ("max_workers", "attempts", "requests_per_minute", "tokens_per_minute"):
        value = settings[name]
        if value is None and name.endswith("_per_minute"):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    for name, least in (("timeout_s", 0.001), ("max_wait_s", 0)):
        if not _is_number(settings[name], least):
            raise ValueError(
                f"{name} must be a number of seconds, at least {least}, got {settings[name]!r}"
            )
    prices = settings["prices"]
    if prices is not None and not (
        isinstance(prices, tuple | list)
        and len(prices) == 2
        and all(_is_number(price, 0) for price in prices)
    ):
        raise ValueError(
            "prices must be two numbers, those of a million tokens of prompts and of answers, got "
            f"{prices!r:.60}"
        )


def _is_number(value: object, least: float) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and isfinite(value)
        and value >= least
    )
