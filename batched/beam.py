"""Model handler that runs a batch function in pipelines of Apache Beam (extra `beam`).

    results, dead = rows | RunInference(ModelHandler(embed)).with_exception_handling()

Beam gives a handler one batch at a time, and an error makes the whole batch a dead letter. This
handler raises only if the function itself is broken. If one element fails, its result raises the
error as soon as `inference` is read. A function after inference reads each result, so that Beam
makes a dead letter of that element alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ._execution.exceptions import copy_exception
from ._installation import needs
from ._services.failures import to_remote

with needs("batched.beam", "beam"):
    # not installed where types are checked
    from apache_beam.metrics import Metrics  # pyright: ignore[reportMissingImports]
    from apache_beam.ml.inference import base  # pyright: ignore[reportMissingImports]

    from .offline import Step
    from .offline.predictor import Predictor, check_step
    from .offline.run.room import features_of_row

__all__ = ["FailedPrediction", "ModelHandler"]

_AHEAD: Final = 32
"""Batches that are formed at once from items of known length.

With log-normal lengths (sigma 0.6) and 32 items a batch, padding is 13 % of all tokens. With two
batches at once, padding is 120 %.
"""


class FailedPrediction(base.PredictionResult):  # type: ignore[misc]  # Beam has no types here
    """Result of an element that failed. Reading `inference` raises the error."""

    @property
    def inference(self) -> Any:
        """No value: reading raises the error, which the tuple holds in this place."""
        raise copy_exception(self[1])  # each raise adds to the traceback

    def __reduce__(self) -> tuple[Any, ...]:
        return FailedPrediction, (self[0], to_remote(self[1]))


class ModelHandler(base.ModelHandler):  # type: ignore[misc]  # Beam has no types here
    """Handler of `RunInference` for a batch function.

    Items of similar lengths run together, a batch that exceeds memory is split, and an element that
    fails is one dead letter.

    A result is a `PredictionResult`. With `with_exception_handling`, each element that failed is in
    `failed_postprocessing[0]`; otherwise its error ends the pipeline. `failed_inferences` holds the
    batches during which the function was broken, its service was away for `outage_s`, or Beam's
    time limit ended.

    Raises:
        TypeError, ValueError: a setting has a wrong type or is out of range.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        large_model: bool = False,
        model_copies: int | None = None,
        max_batch_duration_secs: int | None = None,
        env_vars: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        """Check the settings of Beam's handlers, and `settings` of `offline.Step`.

        Settings for runs alone, like `workers`, are refused. A class is built once per process;
        with `large_model`, it is built once per machine, and with `model_copies`, it is built that
        many times.
        """
        self._step = Step(fn, input="item", output="result", **settings)
        check_step(self._step)
        options = self._step.parts.function.options
        if options.features and self._step.preprocess is None:
            self._step = replace(self._step, preprocess=features_of_row)
        window = options.policy.batch_size
        if options.features or options.item_length:
            window *= _AHEAD
        super().__init__(
            min_batch_size=window,
            max_batch_size=window,
            max_batch_duration_secs=max_batch_duration_secs,
            large_model=large_model,
            model_copies=model_copies,
            env_vars=dict(env_vars or {}),
        )
        self._update: str | None = None  # path of a model that Beam wants to be loaded

    def load_model(self) -> _Model:
        """Return the function, ready to compute. A class is built here."""
        return _Model(self._step)

    def run_inference(
        self,
        batch: Sequence[Any],
        model: _Model,
        inference_args: object = None,  # noqa: ARG002  # validate_inference_args allows none
    ) -> list[Any]:
        """Return a result for each element, in order, and count the elements that failed.

        Raises:
            RunStopped: the function is broken, or its service is away.
            ValueError: the pipeline updates its model.
        """
        if self._update:
            raise ValueError(
                f"RunInference got an update of the model to {self._update!r}; this handler builds "
                "its function from code, so models are not updated in a running pipeline"
            )
        results = [
            each if isinstance(each, FailedPrediction) else base.PredictionResult(item, each)
            for item, each in zip(batch, model.results(batch), strict=True)
        ]
        failed = sum(isinstance(result, FailedPrediction) for result in results)
        Metrics.counter(self.get_metrics_namespace(), "failed_elements_counter").inc(failed)
        return results

    def get_num_bytes(self, batch: Sequence[Any]) -> int:
        """Return about how many bytes of data a batch holds. Parts of a list are not counted."""
        return sum(
            getattr(part, "nbytes", 0) or sys.getsizeof(part)
            for item in batch
            for part in (item.values() if isinstance(item, dict) else [item])
        )

    def get_postprocess_fns(self) -> list[Callable[[Any], Any]]:
        """Return the function that raises the error of a failed element.

        Beam's keyed handlers refuse a handler that has functions after inference. So their
        constructors, which call this method only to check that, get an empty list.
        """
        return [] if sys._getframe(1).f_code.co_name == "__init__" else [_raise_if_failed]

    def validate_inference_args(self, inference_args: Mapping[str, Any] | None) -> None:
        """Refuse all arguments that RunInference is given."""
        if inference_args:
            raise ValueError(
                "arguments of the function are given to the handler, as args= and kwargs=, not to "
                "RunInference as inference_args"
            )

    def update_model_path(self, model_path: str | None = None) -> None:
        """Note an update, which all later batches refuse.

        After an error in this method, Beam would continue with the model that it has.
        """
        self._update = model_path


class _Model(Predictor):
    """The object that Beam keeps as the model, in the worker or in a process of its own."""

    def results(self, items: Sequence[Any]) -> list[Any]:
        """Return the output for each item, or a `FailedPrediction`."""
        outputs = self.rows([{"item": item} for item in items])
        return [
            FailedPrediction(item, output) if isinstance(output, BaseException) else output
            for item, output in zip(items, outputs, strict=True)
        ]


def _raise_if_failed(prediction: Any) -> Any:
    """Return the prediction, with or without a key, or raise the error of its element."""
    result = prediction if isinstance(prediction, base.PredictionResult) else prediction[1]
    _ = result.inference
    return prediction
