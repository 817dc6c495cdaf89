"""The server's metrics for Prometheus."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

disable_created_metrics()  # omits each counter's start time

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


class Numbers:
    """Counters of one server; each server has its own registry."""

    def __init__(self, gauges: dict[str, tuple[str, Callable[[], float]]]):
        """Starts counting.

        Args:
            gauges: description and value function of each gauge, by name; the function runs when metrics are read.
        """
        registry = self._registry = CollectorRegistry()
        self.requests = Counter("recjax_requests", "Requests.", ["path", "status"], registry=registry)
        self.completions = Counter("recjax_completions", "Completions by finish reason.", ["finish"], registry=registry)
        self.prompt_tokens = Counter("recjax_prompt_tokens", "Tokens of prompts.", registry=registry)
        self.tokens = Counter("recjax_completion_tokens", "Tokens of completions.", registry=registry)
        self.rewards = Counter("recjax_rewards", "Accepted rewards.", registry=registry)
        seconds = {"buckets": _SECONDS, "registry": registry}
        first = "Seconds from the arrival of a request to its first tokens."
        self.first_token = Histogram("recjax_first_token_seconds", first, **seconds)
        last = "Seconds from the arrival of a request to the end of its completions."
        self.whole = Histogram("recjax_request_seconds", last, **seconds)
        for name, (words, value) in gauges.items():
            Gauge(f"recjax_{name}", words, registry=registry).set_function(value)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
