"""Function of a step in its own process, or as an actor: calls, results and errors are messages."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import cloudpickle

from ..._connect import frames
from ..._connect.memory import LARGE
from ..._connect.pipe import Answer
from ..._execution.memory import release_memory
from ..._services.failures import is_memory_error, to_remote
from ..step import Step
from .function import build


class Server:
    """Function of a step. The first call builds it from a pickled `Step`.

    Buffers of fewer than `least` bytes are in the pickle of their message.
    """

    def __init__(self, name: str, least: float = LARGE) -> None:
        self._name = name
        self._least = least
        self._call: Callable[..., Any] = self._build
        self._on: tuple[type[BaseException], ...] = ()

    def _build(self, payload: bytes) -> None:
        try:
            step: Step = pickle.loads(payload)
        except Exception as error:
            raise TypeError(
                f"{self._name} cannot be found in its process ({type(error).__name__}: {error})"
                "; define it, and what it refers to, in a module that can be imported"
            ) from None
        self._on = step.retry.on
        self._call = build(step)

    def answer(self, message: frames.Message) -> Answer:
        """Return the answer to a call.

        The error of a service crosses as a `RemoteError`, since details of it may be lost.
        """
        try:
            args, kwargs = frames.load(message)
            output = self._call(*args, **kwargs)
            if type(output) in (list, tuple):  # exceptions in the place of results
                output = [
                    to_remote(row, self._on) if isinstance(row, BaseException) else row
                    for row in output
                ]
            return frames.RESULT, pickled(output, self._least)
        except BaseException as error:
            remote = to_remote(error, self._on)
            answer = frames.error_message(remote if remote.is_service else error)
            if is_memory_error(error):
                release_memory(error)
            return frames.ERROR, answer


def pickled(value: object, least: float = LARGE) -> frames.Message:
    """Return `value` as a message. Objects of the main script travel by value."""
    with suppress(Exception):  # cloudpickle can more, and takes longer for small arrays
        message = frames.pickled(value, least=least)
        if b"__main__" not in message[0]:  # the name of the module or, harmless, in a text
            return message
    return frames.pickled(value, cloudpickle.Pickler, least)
