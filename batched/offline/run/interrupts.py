"""Ctrl-C in a run: one line at once, one deadline, and an end by the second one."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts(post: Callable[[Callable[[], object]], None], grace: float) -> Iterator[None]:
    """Make Ctrl-C an event of the run, for the time of the context.

    `post` hands a function to the thread of the run. Raised between two instructions,
    KeyboardInterrupt would lose results that are just taken from the queue. A second Ctrl-C is
    raised where it comes. Calls that run get `grace` seconds.
    """

    def raise_it() -> None:
        raise KeyboardInterrupt

    def interrupt(*_: Any) -> None:
        signal.signal(signal.SIGINT, raises)
        print(
            f"Interrupted: finishing the calls that run, {grace:g} s at most; again to leave now",
            file=sys.stderr,
            flush=True,
        )
        post(raise_it)

    raises = signal.default_int_handler
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not raises:  # the program has its own way
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, raises)
