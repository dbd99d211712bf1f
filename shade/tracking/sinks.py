"""The sinks of events: OpenTelemetry, MLflow, runs of W&B and Trackio, TensorBoard. Their packages load when asked for.

Invariant: every finite number of an event arrives, under one name, in each of them.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from shade.errors import ConfigError
from shade.installation import install_hint
from shade.registry import did_you_mean
from shade.telemetry import TensorBoardSink

_GAUGE: Final = re.compile(r"loss|accuracy|rate|ratio|per_|p\d\d|capacity|resident|cpus|num_|world|density|norm|_step$")
"""Names of numbers that say how things are. Others say how much was added since the last event of their kind."""
_UNITS: Final = {"_seconds": (".duration", "s"), "_bytes": (".size", "By"), "": ("", "1")}
"""By the end of a name: what OpenTelemetry's conventions put there, and the unit."""


def sink_named(name: str) -> Any:
    """Returns a new sink; raises ConfigError if the name is unknown, or its package is not installed."""
    if name not in TRACKERS:
        raise ConfigError(f"no tracker named {name!r}{did_you_mean(name, TRACKERS)}; known: {', '.join(TRACKERS)}")
    return TRACKERS[name]()


def _imported(module: str, extra: str = "") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        cure = install_hint(extra) if extra else f"pip install {package}"
        raise ConfigError.of(f"the package of {module}", str(error), cure) from None


def _numbers(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields the numbers of a row, nested ones as ``outer.inner``; not its place and time."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float)) and math.isfinite(value) and name not in ("rank", "time", "seconds"):
            yield prefix + name, float(value)


class OpenTelemetrySink:
    """Sends each event as a span ``shade.<kind>``, and its numbers as metrics, over OTLP and HTTP.

    The variables of OpenTelemetry's SDK hold. Every duration is in the histogram ``shade.<kind>.duration``.
    """

    def __init__(self) -> None:
        trace, metrics = _imported("opentelemetry.sdk.trace", "otlp"), _imported("opentelemetry.sdk.metrics", "otlp")
        spans = _imported("opentelemetry.exporter.otlp.proto.http.trace_exporter", "otlp").OTLPSpanExporter()
        sums = _imported("opentelemetry.exporter.otlp.proto.http.metric_exporter", "otlp").OTLPMetricExporter()
        self._status = _imported("opentelemetry.trace")
        about = _imported("opentelemetry.sdk.resources").Resource.create()
        if str(about.attributes["service.name"]).startswith("unknown_service"):
            about = about.create({"service.name": "shade"})
        self._traces = trace.TracerProvider(resource=about, shutdown_on_exit=False)
        self._traces.add_span_processor(_imported("opentelemetry.sdk.trace.export").BatchSpanProcessor(spans))
        reader = _imported("opentelemetry.sdk.metrics.export").PeriodicExportingMetricReader(sums)
        self._metrics = metrics.MeterProvider([reader], resource=about, shutdown_on_exit=False)
        self._tracer, self._meter = self._traces.get_tracer("shade"), self._metrics.get_meter("shade")
        self._instruments: dict[str, Callable[..., None]] = {}

    def write(self, row: Mapping[str, Any]) -> None:
        """Takes one event."""
        kind, seconds = f"shade.{row['kind']}", float(row["seconds"])
        labels, end = {"shade.rank": row["rank"]}, int(row["time"] * 1e9)
        words = {f"{kind}.{name}": value for name, value in row.items() if isinstance(value, str) and name != "kind"}
        numbers = {f"{kind}.{name}": value for name, value in _numbers(row)}
        span = self._tracer.start_span(
            kind, start_time=end - int(seconds * 1e9), attributes={**labels, **words, **numbers}
        )
        if "error" in row:
            labels["error.type"] = row["error"]
            span.set_attribute("error.type", row["error"])
            span.set_status(self._status.StatusCode.ERROR)
        span.end(end)
        self._instrument(f"{kind}.duration", "s", self._meter.create_histogram, "record")(seconds, labels)
        for name, value in numbers.items():
            suffix = next(end for end in _UNITS if name.endswith(end))
            if not name.endswith((".epoch", ".step")):
                ending, unit = _UNITS[suffix]
                is_gauge = _GAUGE.search(name) is not None or value < 0
                make, act = (self._meter.create_gauge, "set") if is_gauge else (self._meter.create_counter, "add")
                self._instrument(name.removesuffix(suffix) + ending, unit, make, act)(value, labels)

    def _instrument(self, name: str, unit: str, make: Callable[..., Any], act: str) -> Callable[..., None]:
        if name not in self._instruments:
            self._instruments[name] = getattr(make(name, unit=unit), act)
        return self._instruments[name]

    def close(self) -> None:
        """Sends what is left."""
        self._traces.shutdown()
        self._metrics.shutdown()


class MlflowSink:
    """Logs each event's numbers into MLflow's active run, or into one that it starts; over epochs or steps."""

    def __init__(self) -> None:
        self._mlflow = _imported("mlflow")
        active = self._mlflow.active_run()
        self._run, self._is_own = active or self._mlflow.start_run(), active is None

    def write(self, row: Mapping[str, Any]) -> None:
        """Takes one event."""
        self._mlflow.log_metrics(
            _tags(row), step=int(row.get("epoch", row.get("step", 0))), run_id=self._run.info.run_id
        )

    def close(self) -> None:
        """Ends the run, if it was started here."""
        if self._is_own:
            self._mlflow.end_run()


class RunSink:
    """Logs each event's numbers into a run of W&B or of Trackio, by default one of the project ``shade``.

    Args:
        run: An object with ``log(numbers)`` and ``finish()``, as ``wandb.init`` and ``trackio.init`` return it.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, row: Mapping[str, Any]) -> None:
        """Takes one event."""
        # Their own step must not fall, and events of several kinds count differently: epoch and step are numbers too.
        self._run.log(_tags(row))

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


def _tags(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns an event's numbers as trackers name them: ``rank0/save/blocked_seconds``."""
    place = f"rank{row['rank']}/{row['kind']}"
    numbers = {f"{place}/{name.replace('.', '/')}": value for name, value in _numbers(row)}
    return numbers | {f"{place}/seconds": float(row["seconds"])}


TRACKERS: Final[Mapping[str, Callable[[], Any]]] = {
    "otlp": OpenTelemetrySink,
    "mlflow": MlflowSink,
    "wandb": lambda: RunSink(_imported("wandb").init(project="shade")),
    "trackio": lambda: RunSink(_imported("trackio").init(project="shade")),
    "tensorboard": lambda: TensorBoardSink("runs/tensorboard"),
}
"""The sinks by name."""
