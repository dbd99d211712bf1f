"""Shows what happens in a training in OpenTelemetry, MLflow, W&B, Trackio and TensorBoard."""

from __future__ import annotations

from shade.tracking.events import Sink, emit, listen
from shade.tracking.sinks import RunSink

__all__ = ["RunSink", "Sink", "emit", "listen"]
