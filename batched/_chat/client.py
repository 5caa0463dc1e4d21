"""Clients of services: `ChatClient`, `EmbeddingClient`, and the parts that they share."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, Never, SupportsIndex, overload

from .._function.batched import Batched
from .._function.settings import Options
from .._installation import needs
from .._services.prompts import Prompt
from .records import Usage

if TYPE_CHECKING:
    from typing import Self

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import TypeVar

    from .settings import Address, Amount, Count, Key, Prices, Seconds, Text

    Vector = NDArray[np.float32]
    T = TypeVar("T")
    U = TypeVar("U", default=str)
else:
    from typing import TypeVar

    T = TypeVar("T")
    U = TypeVar("U")
    Vector = Any

P = TypeVar("P", bound=Prompt)

OF_FUNCTION: Final = ("name", "max_queue_size", "on_full", "queue_timeout_ms", "on_batch")
"""Settings of every batched function that a client has, too."""

HEADERS: Final = "extra_headers"
"""Parameter that may hold a key."""
SECRETS: Final = ("api_key", HEADERS)
PASSWORD: Final = re.compile("(?<=//)[^/@]*@")
"""Name and password in an address."""


class Client(Batched[T, U, ...], Generic[T, U]):
    """A client of a service that speaks OpenAI's protocol."""

    retries_itself: Final = True
    """After a fault of the service, a second call would only repeat the retries of the first."""

    def _start(self, owner: Any, given: dict[str, Any]) -> None:
        """Begin with the arguments of the constructor of `owner`.

        Raises:
            TypeError, ValueError: a setting is unknown, of the wrong type, or out of its range.
            ImportError: the extra is not installed.
        """
        with needs(owner.__name__, "chat"):  # not before the first client
            from .questions import ChatRequests
            from .runtime import ClientFunction
            from .session import Session
            from .settings import read_settings
            from .texts import TextRequests
        parameters = given.pop("parameters")
        del given["self"]
        self._settings = settings = read_settings(owner.__init__, given)
        self._arguments = given | parameters
        of_function = {name: parameters.pop(name) for name in OF_FUNCTION if name in parameters}
        of_function["name"] = name = of_function.get("name") or settings.model
        self._parameters = parameters
        requests: Any = ChatRequests if owner is ChatClient else TextRequests
        requests = requests(name, settings, parameters)
        if settings.max_cost is not None and requests.prices is None:
            raise ValueError(f"{name}: max_cost needs the prices of tokens")
        of_requests = {
            "batch_size": requests.most_items,
            "length": requests.length,
            "max_batch_tokens": requests.most_tokens,
            "max_concurrent_batches": settings.max_workers,
        }
        options = Options().updated(of_requests | of_function)
        self._session = Session(name, settings, requests)
        super().__init__(
            ClientFunction(self._session, "static", False, options, preparation=requests)
        )

    @property
    def usage(self) -> Usage:
        """Snapshot of the requests since the client was made, and of the service's limits now."""
        session = self._session
        limits = session.service.limits
        return Usage(
            **vars(session.counts),
            cost=None if session.kind.prices is None else session.spent,
            limit=limits.limit,
            paused_s=max(0.0, limits.held_until - perf_counter()),
            is_open=limits.open_until is not None,
        )

    @property
    def spent(self) -> float:
        """Cost of all requests so far; a run over a dataset gives it back when it goes on."""
        return self._session.spent

    @spent.setter
    def spent(self, cost: float) -> None:
        self._session.spent = cost

    def share(self, workers: int) -> Self:
        """Return the client of one of several worker processes, with its share of `max_cost`."""
        most = self._settings.max_cost
        left = None if most is None else max(0.0, most - self.spent) / workers
        return self.with_options(max_cost=left)

    @property
    def options(self) -> Mapping[str, Any]:
        """Settings and parameters of this client by name, read-only, without secrets."""
        shown = {name: self._arguments[name] for name in self._arguments if name not in SECRETS}
        return MappingProxyType(shown | {"base_url": self._address})

    @property
    def _address(self) -> str:
        return PASSWORD.sub("***@", self._settings.base_url)

    @property
    def meaning(self) -> str:
        """Basis of the results, as JSON: model, system message, schema and parameters."""
        settings = vars(self._settings)
        schema = settings.get("schema")
        meaning = {
            "model": settings["model"],
            "system": settings.get("system"),
            "schema": None if schema is None else schema.model_json_schema(),
            "details": settings.get("details"),
            "parameters": self._parameters | {HEADERS: None},
        }
        return json.dumps(meaning, sort_keys=True, default=lambda value: type(value).__name__)

    def with_options(self, **changes: Any) -> Self:
        """Return the same client with other settings or parameters, and a queue of its own.

        Clients of one service share its limits.

        Raises:
            TypeError, ValueError: a setting is unknown, of the wrong type, or out of its range.
        """
        return type(self)(**self._arguments | changes)

    def __reduce_ex__(self, _: SupportsIndex) -> tuple[Any, ...]:
        return functools.partial(type(self), **self._arguments), ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._settings.model} at {self._address}>"


class ChatClient(Client[Prompt, U], Generic[U]):
    """A client of a hosted or local chat service that speaks OpenAI's protocol.

    `client(prompt)` returns the text of the answer or, with `schema`, an instance of that pydantic
    class. A prompt is a text, or a list of messages. All clients of one service, which is an
    address and a key, share one set of limits. A client adapts the number of requests at once to
    the service, and a pause that the service asks for applies to all requests. Further keywords are
    parameters of chat completions, or settings of `batched.dynamically` for the queue:
    `max_queue_size`, `on_full`, `queue_timeout_ms`, `on_batch`, `name`.

    Args:
        base_url: address of the service, for example `http://localhost:8000/v1`.
        model: name of the model there.
        schema: pydantic class of the results; None: results are texts.
        details: whether results are instances of `ChatAnswer`.
        max_workers: most requests at once.
        api_key: key of the service, or function that returns it; None: `OPENAI_API_KEY` of the
            environment.
        system: system message before each prompt.
        timeout_s: longest time of one request, to its last byte.
        attempts: most requests for one prompt that fail by themselves.
        max_wait_s: longest wait of a call for a service that refuses it, or answers no request.
        requests_per_minute: requests in a minute, which are spaced evenly.
        tokens_per_minute: budget of tokens in any 60 seconds.
        prices: prices of a million tokens of prompts, and of answers, for `usage.cost`.
        max_cost: most cost by `prices`; a prompt that may exceed it is not sent, and fails.

    Raises:
        TypeError, ValueError: a setting is unknown, of the wrong type, or out of its range.
        ImportError: the `openai` client is not installed.
    """

    def __init__(
        self,
        base_url: Address,
        model: Text,
        *,
        schema: type[U] | None = None,
        details: bool = False,
        max_workers: Count = 30,
        api_key: Key | None = None,
        system: Text | None = None,
        timeout_s: Seconds = 60.0,
        attempts: Count = 5,
        max_wait_s: Amount = 600.0,
        requests_per_minute: Count | None = None,
        tokens_per_minute: Count | None = None,
        prices: Prices | None = None,
        max_cost: Amount | None = None,
        **parameters: Any,
    ) -> None:
        self._start(ChatClient, locals())

    if TYPE_CHECKING:
        # a list of prompts may hold texts only, or chats only

        @overload  # no call matches it: it is for functions that take a `Callable[..., U]`
        def __call__(self, /, *, never: Never) -> U: ...
        @overload
        def __call__(self, prompts: list[P], /, **parameters: Any) -> list[U]: ...
        @overload
        def __call__(self, prompt: Prompt, /, **parameters: Any) -> U: ...
        def __call__(self, prompt: Any = ..., /, **parameters: Any) -> Any: ...

        @overload
        async def acall(self, prompts: list[P], /, **parameters: Any) -> list[U]: ...
        @overload
        async def acall(self, prompt: Prompt, /, **parameters: Any) -> U: ...
        async def acall(self, prompt: Any, /, **parameters: Any) -> Any: ...


class EmbeddingClient(Client[str, Vector]):
    """A client of a hosted or local service of embeddings that speaks OpenAI's protocol.

    `client(text)` returns the vector of a text, an array of float32. The texts of all callers share
    requests. All clients of one service, which is an address and a key, share one set of limits,
    chat clients included. Further keywords are parameters of embeddings, for example `dimensions`,
    or settings of `batched.dynamically` for the queue, as of `ChatClient`. So are `max_workers`,
    `api_key`, `timeout_s`, `attempts`, `max_wait_s`, `requests_per_minute` and `tokens_per_minute`.

    Args:
        base_url: address of the service, for example `http://localhost:8000/v1`.
        model: name of the model there.
        max_inputs: most texts in one request.
        max_tokens: most tokens of all texts in one request.
        count_tokens: function that returns the tokens of a text; None: a quarter of its characters.
        price: price of a million tokens, for `usage.cost`.
        max_cost: most cost by `price`; a text that may exceed it is not sent, and fails.

    Raises:
        TypeError, ValueError: a setting is unknown, of the wrong type, or out of its range.
        ImportError: the `openai` client is not installed.
    """

    def __init__(
        self,
        base_url: Address,
        model: Text,
        *,
        max_inputs: Count = 32,
        max_tokens: Count = 8192,
        count_tokens: Callable[[str], int] | None = None,
        max_workers: Count = 8,
        api_key: Key | None = None,
        timeout_s: Seconds = 60.0,
        attempts: Count = 5,
        max_wait_s: Amount = 600.0,
        requests_per_minute: Count | None = None,
        tokens_per_minute: Count | None = None,
        price: Amount | None = None,
        max_cost: Amount | None = None,
        **parameters: Any,
    ) -> None:
        self._start(EmbeddingClient, locals())
