"""`batched.live()`: every batched function of the process."""

from __future__ import annotations

import gc

import batched


def test_live_functions_are_listed_with_each_instance_that_was_called() -> None:
    class Model:
        @batched.dynamically
        def double(self, items: list[int]) -> list[int]:
            return [2 * item for item in items]

    @batched.dynamically
    def triple(items: list[int]) -> list[int]:
        return [3 * item for item in items]

    first, second = Model(), Model()
    first.double(1), second.double(2), second.double(3)
    mine = [fn for fn in batched.live() if fn in (triple, first.double, second.double)]
    assert sorted(fn.stats.calls for fn in mine) == [0, 1, 2]
    assert first.double in mine
    gone = second.double
    del second, mine, gone
    gc.collect()
    names = [fn.__name__ for fn in batched.live()]
    assert names.count("double") == 1
    del triple
    gc.collect()
    assert "triple" not in [fn.__name__ for fn in batched.live()]


def test_methods_of_a_class_are_listed_with_the_class_that_was_called() -> None:
    class Model:
        @batched.dynamically
        @classmethod
        def halve(cls, items: list[int]) -> list[float]:
            return [item / 2 for item in items]

    assert Model().halve(3) == 1.5
    for _ in range(2):
        (found,) = [fn for fn in batched.live() if fn.__name__ == "halve"]
        assert (found.stats.calls, found == Model.halve) == (1, True)
