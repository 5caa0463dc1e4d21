"""ModelHandler: a batch function in pipelines of Apache Beam (extra `beam`).

    results, dead = rows | RunInference(ModelHandler(embed)).with_exception_handling()

Beam hands over its batches whole, and one that raises is a dead letter as a whole. Here a batch
raises only if the function is broken. What fails for one element comes out as that element's
result, and is raised by a function after inference (`get_postprocess_fns`), which Beam calls for
one element at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Final, NoReturn

from ._batched import _BatchedBase, parts_of
from ._core.exceptions import copy_exception
from .offline import Auto, Retry, Step
from .offline._errors import describe, to_remote
from .offline._predictor import Predictor
from .offline._serving import _is_importable
from .offline._step import check_whole

try:
    # not where types are checked
    from apache_beam.ml.inference import base  # pyright: ignore[reportMissingImports]
except ImportError as missing:
    raise ImportError(
        'batched.beam needs apache-beam: pip install "batched-dynamically[beam]"'
    ) from missing

__all__ = ["ModelHandler"]

_AHEAD: Final = 32
"""Batches that are formed at once where lengths are known: of lengths with a log-normal spread of
0.6, batches of 32 then hold 13 % of padding, and 120 % if formed two at a time.
"""


class ModelHandler(base.ModelHandler):  # type: ignore[misc]  # Beam's types are not read
    """Handler of `RunInference` that computes with a batch function: items of like length run
    together, a batch for which memory does not suffice is run in parts, and an element that fails
    is one dead letter.

    Results are `PredictionResult`s. One whose inference has failed is raised after inference: with
    `with_exception_handling` it is in `failed_postprocessing[0]`, else it ends the pipeline. In
    `failed_inferences` are the batches for which the function itself is broken, or too slow.

    Raises:
        TypeError, ValueError: a setting is of the wrong type or out of its range; the sentence
            says which, and what is allowed.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        batch_size: int | Auto | None = None,
        length: Callable[[Any], float] | None = None,
        max_batch_tokens: int | None = None,
        retry: Retry | None = None,
        preprocess: Callable[[Any], Any] | None = None,
        postprocess: Callable[[Any], Any] | None = None,
        isolate_errors: bool = True,
        large_model: bool = False,
        model_copies: int | None = None,
        max_batch_duration_secs: int | None = None,
        env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """All up to `isolate_errors` are those of `offline.Step`, the others those of Beam's own
        handlers. A class is built once per process; with `large_model` or `model_copies`, once or
        that often per machine.
        """
        self._step = Step(
            fn,
            input="item",
            output="result",
            args=args,
            kwargs=kwargs or {},
            batch_size=batch_size,
            length=length,
            max_batch_tokens=max_batch_tokens,
            retry=retry or Retry(),
            preprocess=preprocess,
            postprocess=postprocess,
            isolate_errors=isolate_errors,
        )
        if not isinstance(large_model, bool):
            raise TypeError(f"large_model must be True or False, got {large_model!r}")
        if model_copies is not None:
            check_whole("model_copies", model_copies)
        if max_batch_duration_secs is not None:
            check_whole("max_batch_duration_secs", max_batch_duration_secs)
        variables = env_vars or {}
        if not isinstance(variables, Mapping) or not all(
            isinstance(each, str) for each in chain.from_iterable(variables.items())
        ):
            raise TypeError(f"env_vars must be a dict of strings, got {env_vars!r}")
        options = self._step.parts.function.options
        has_lengths = options.features is not None or options.item_length is not None
        window = options.policy.batch_size * (_AHEAD if has_lengths else 1)
        super().__init__(
            min_batch_size=window,
            max_batch_size=window,
            max_batch_duration_secs=max_batch_duration_secs,
            large_model=large_model,
            model_copies=model_copies,
            env_vars=dict(variables),
        )

    def load_model(self) -> _Model:
        """The function, ready to compute; a class is built."""
        return _Model(self._step)

    def run_inference(
        self, batch: Sequence[Any], model: _Model, inference_args: object = None
    ) -> Iterable[Any]:
        """A result for each element, in order."""
        del inference_args  # there are none
        return map(base.PredictionResult, batch, model.results(batch))

    def get_postprocess_fns(self) -> list[Callable[[Any], Any]]:
        """What raises the error of an element that has failed."""
        return [_raise_failure]

    def validate_inference_args(self, inference_args: Mapping[str, Any] | None) -> None:
        """Refuses all that RunInference is given."""
        if inference_args:
            raise ValueError(
                "arguments of the function are given to the handler, as args= and kwargs=, not to "
                "RunInference as inference_args"
            )

    def update_model_path(self, model_path: str | None = None) -> NoReturn:
        """Refuses all updates of a model."""
        raise ValueError(f"this handler has no model path, and RunInference got {model_path!r}")

    def __getstate__(self) -> dict[str, Any]:
        step = copy(self._step)
        if not _is_importable(step.fn) and isinstance(step.fn, _BatchedBase):
            vars(step)["fn"] = _ByValue(step.fn)
        return {**vars(self), "_step": step}


class _ByValue:
    """A decorated function that another process does not find by its name."""

    def __init__(self, fn: _BatchedBase[Any, Any, Any]) -> None:
        self._fn = fn

    def __reduce__(self) -> tuple[Any, ...]:
        parts = parts_of(self._fn)
        return type(self._fn), (replace(parts.function), parts.owner)


class _Model:
    """What Beam keeps as the model, here or in a process of its own."""

    def __init__(self, step: Step) -> None:
        if step.parts.function.options.features is not None:
            step = replace(step, preprocess=partial(_features_of, step.preprocess))
        self._predictor = Predictor(step)

    def results(self, items: Sequence[Any]) -> list[Any]:
        """The result of each item, or its failure."""
        outputs = self._predictor.rows([{"item": item} for item in items])
        return [
            _Failure(output) if issubclass(type(output), BaseException) else output
            for output in outputs
        ]


class _Failure:
    """An error in the place of a result; where it crosses to another process, as plain data."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _Failure, (to_remote(self.error),)

    def __repr__(self) -> str:
        return f"<{describe(self.error).error}>"


def _features_of(preprocess: Callable[[Any], Any] | None, row: Mapping[str, Any]) -> Any:
    """Features of the one row that an element is."""
    import numpy

    item = row["item"] if preprocess is None else preprocess(row["item"])
    return {name: numpy.asarray(each)[None] for name, each in item.items()}


def _raise_failure(prediction: Any) -> Any:
    if isinstance(prediction.inference, _Failure):
        raise copy_exception(prediction.inference.error)  # raising adds to its traceback
    return prediction
