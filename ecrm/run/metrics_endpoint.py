"""Numbers of a run for Prometheus, over HTTP, from the rank that reports: `metrics.port`.

A reporter begins to listen with its first event, and stops as soon as another rank reports. A new
reporter first takes the events in the run folder, so counters go on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ecrm.base.console import say
from ecrm.engine import events
from ecrm.engine.events import Event
from ecrm.run.run_status import RunStatus

if TYPE_CHECKING:
    from http.server import HTTPServer

PATH = "/metrics"
CLIENT_SECONDS = 5.0
"""The longest wait for a client, on a thread of the client's own."""

METRICS = {
    "ecrm_step": ("gauge", "Steps finished, as told by the last progress event."),
    "ecrm_steps_wanted": ("gauge", "Steps of the whole run; 0 if not known."),
    "ecrm_steps_per_second": ("gauge", "Pace of the last progress event."),
    "ecrm_samples_per_second": ("gauge", "Pace in samples, if a step's samples are known."),
    "ecrm_failures_total": ("counter", "Failures survived since the start."),
    "ecrm_failures_left": ("gauge", "Failures that can still be survived at once."),
    "ecrm_rebuilt_ratio": ("gauge", "Share of lost rows that is back; 1 if none is missing."),
    "ecrm_ranks_live": ("gauge", "Living ranks, spares among them."),
    "ecrm_rollbacks_total": ("counter", "Returns to a checkpoint since the start."),
    "ecrm_checkpoint_step": ("gauge", "Step of the newest checkpoint."),
    "ecrm_checkpoint_seconds": ("gauge", "Seconds to write the newest checkpoint."),
    "ecrm_checkpoint_failures_total": ("counter", "Checkpoints not written since the start."),
    "ecrm_last_event_seconds": ("gauge", "Time of the last event, in seconds since the epoch."),
    "ecrm_logged": ("gauge", "Means of logged values, by name."),
    "ecrm_evaluation": ("gauge", "Values of the last evaluation, by name."),
}
"""Kind and meaning of each metric."""

COUNTED: dict[type[Event], str] = {
    events.RolledBack: "ecrm_rollbacks_total",
    events.CheckpointFailed: "ecrm_checkpoint_failures_total",
}
"""Counters, by the event that is counted."""


class Numbers:
    """The metrics of a run as told by its events. Pure: events in, text out."""

    def __init__(self) -> None:
        self._status = RunStatus(0)
        self._values: dict[str, float] = {}
        self._named: dict[str, dict[str, float]] = {}

    def take(self, told: Event, time: float) -> None:
        """Bring the metrics up to date with an event; `time` is in seconds since the epoch."""
        status, values = self._status, self._values
        status.take([{"time": time, **told.to_dict()}])
        if isinstance(told, events.Start):
            values.update(dict.fromkeys(COUNTED.values(), 0))
            values["ecrm_ranks_live"] = told.world_size
        elif isinstance(told, events.Progress):
            self._name("ecrm_logged", told.logged or {})
        elif isinstance(told, events.Evaluation):
            self._name("ecrm_evaluation", told.values)
        elif isinstance(told, events.View):
            values["ecrm_ranks_live"] = len(told.live)
        elif isinstance(told, events.Checkpoint):
            values["ecrm_checkpoint_step"] = told.step
            values["ecrm_checkpoint_seconds"] = told.seconds
        if metric := COUNTED.get(type(told)):
            values[metric] = values.get(metric, 0) + 1
        if status.started:
            values["ecrm_step"] = status.step
            values["ecrm_steps_wanted"] = status.steps
            values["ecrm_failures_total"] = status.failures
            values["ecrm_rebuilt_ratio"] = status.rebuilt
        self._set("ecrm_steps_per_second", status.steps_per_second)
        self._set("ecrm_samples_per_second", status.samples_per_second)
        self._set("ecrm_failures_left", status.failures_left)
        values["ecrm_last_event_seconds"] = time

    def _set(self, metric: str, value: float | None) -> None:
        if value is not None:
            self._values[metric] = value

    def _name(self, metric: str, values: Mapping[str, float | None]) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        self._named.setdefault(metric, {}).update(known)

    def text(self) -> str:
        """The metrics in Prometheus' text format, version 0.0.4; unknown metrics are left out."""
        lines = []
        for metric, (kind, meaning) in METRICS.items():
            samples = [
                f'{metric}{{name="{_escaped(name)}"}} {float(value)!r}'
                for name, value in self._named.get(metric, {}).items()
            ]
            if metric in self._values:
                samples.append(f"{metric} {float(self._values[metric])!r}")
            if samples:
                lines += [f"# HELP {metric} {meaning}", f"# TYPE {metric} {kind}", *samples]
        return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class MetricsEndpoint:
    """Serves the metrics of a run at `port` of `address` while this rank reports; 0: never.

    A port in use costs a line, and is tried again with the next event: a dead reporter of the same
    host may hold the port for a moment.
    """

    _listening: ClassVar[MetricsEndpoint | None] = None  # one for a process, of its last session

    def __init__(self, port: int = 0, address: str = "") -> None:
        self._port, self._address = port, address
        self._numbers, self._page = Numbers(), b""
        self._server: HTTPServer | None = None
        self._complained = False

    def begin(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """This rank reports from now on; `lines` of events.jsonl are of the reporters before."""
        self._numbers = Numbers()
        for line in lines if self._port else ():
            self._numbers.take(events.of_line(line), line["time"])

    def tell(self, told: Event, time: float) -> None:
        """Serve the metrics with this event of the present reporter."""
        if not self._port:
            return
        self._numbers.take(told, time)
        self._page = self._numbers.text().encode()
        if self._server is None:
            self._listen()

    def end(self) -> None:
        """Another rank reports from now on, or the run is over."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server, MetricsEndpoint._listening = None, None

    def _listen(self) -> None:
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
        from socketserver import TCPServer

        endpoint = self

        class Server(ThreadingHTTPServer):
            def server_bind(self) -> None:
                """Bind, and ask no name server for this host's name: an answer may take seconds."""
                TCPServer.server_bind(self)

        class Handler(BaseHTTPRequestHandler):
            timeout = CLIENT_SECONDS

            def do_GET(self) -> None:
                page = endpoint._page
                self.send_response(200 if self.path == PATH else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(page) if self.path == PATH else 0))
                self.end_headers()
                if self.path == PATH:
                    self.wfile.write(page)

            def log_message(self, *_: object) -> None:
                """Say nothing: a look at the metrics is no news."""

        if MetricsEndpoint._listening is not None:
            MetricsEndpoint._listening.end()
        try:
            self._server = Server((self._address, self._port), Handler)
        except OSError as error:
            if not self._complained:
                say(f"! metrics.port {self._port}: {error.strerror}; tried again with each event")
            self._complained = True
            return
        MetricsEndpoint._listening = self
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=(0.1,), name="metrics", daemon=True).start()
