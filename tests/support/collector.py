"""A stand-in for an OpenTelemetry collector: it takes what the exporters post over HTTP, and decodes it."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class Collector:
    """A collector's HTTP receiver: it decodes what OpenTelemetry's exporters post."""

    def __init__(self) -> None:
        trace = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        metrics = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
        kinds = {"/v1/traces": trace.ExportTraceServiceRequest, "/v1/metrics": metrics.ExportMetricsServiceRequest}
        self.requests: list[Any] = []
        collected = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collected.append(kinds[self.path].FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    @property
    def spans(self) -> list[Any]:
        traces = [each for request in self.requests for each in getattr(request, "resource_spans", ())]
        return [span for each in traces for scope in each.scope_spans for span in scope.spans]

    @property
    def metrics(self) -> dict[str, Any]:
        """The last state of each metric, by name."""
        all_ = [each for request in self.requests for each in getattr(request, "resource_metrics", ())]
        return {metric.name: metric for each in all_ for scope in each.scope_metrics for metric in scope.metrics}

    @property
    def services(self) -> set[str]:
        found = [each for request in self.requests for each in (*getattr(request, "resource_spans", ()),)]
        attributes = [attribute for each in found for attribute in each.resource.attributes]
        return {each.value.string_value for each in attributes if each.key == "service.name"}

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
