"""Metrics: the content of /metrics, in Prometheus' text format. Names follow vLLM's, with nanovllm in front.

Requests are counted when their answers end. Each server has its own registry. A busy server also logs its throughput.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nanovllm.errors import EngineError
from nanovllm.plan.outputs import RequestOutput

LOG_INTERVAL_S = 10.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "nanovllm:"
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_TOKEN_S = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10)

# Entry of the engine's stats, name of the metric, help, and True for a counter
_FIGURES = (
    ("num_running", "num_requests_running", "Answers in progress in the engine", False),
    ("num_waiting", "num_requests_waiting", "Answers that the engine has not begun, or has preempted", False),
    ("num_preemptions", "num_preemptions", "Answers that lost their blocks and start again", True),
    ("num_steps", "engine_steps", "Steps that the engine has run", True),
    ("num_gpu_blocks", "num_gpu_blocks", "Blocks or slots in the GPU's memory", False),
    ("num_free_gpu_blocks", "num_free_gpu_blocks", "Blocks in GPU memory that are not in use", False),
    ("num_cpu_blocks", "num_cpu_blocks", "Blocks in CPU memory", False),
    ("num_free_cpu_blocks", "num_free_cpu_blocks", "Blocks in CPU memory that are not in use", False),
    ("num_resident_blocks", "num_resident_blocks", "Slots that hold a block", False),
    ("num_shadow_pages", "num_shadow_pages", "Blocks that the shadow has room for", False),
    ("num_used_shadow_pages", "num_used_shadow_pages", "Blocks that the shadow holds", False),
    ("num_state_slots", "num_state_slots", "States of sequences that the GPU has room for", False),
    ("num_snapshots", "num_state_snapshots", "States that CPU memory has room for", False),
    ("num_used_snapshots", "num_used_state_snapshots", "States kept in CPU memory for later prompts", False),
    ("num_state_loads", "state_loads", "Answers that began with a state from CPU memory", True),
    ("num_state_saves", "state_saves", "States that were kept for later prompts", True),
    ("num_hit_blocks", "resident_block_reads", "Blocks that steps read from GPU memory", True),
    ("num_missed_blocks", "streamed_block_reads", "Blocks that steps read from CPU memory", True),
    ("num_cpu_tokens", "cpu_attention_tokens", "Tokens whose keys the CPU attended to", True),
    ("num_loaded_bytes", "loaded_bytes", "Bytes copied to the GPU", True),
    ("num_offloaded_bytes", "offloaded_bytes", "Bytes copied to CPU memory", True),
    ("link_byte_per_s", "link_bytes_per_second", "The link's rate, as measured at start-up", False),
    ("load_byte_per_s", "load_bytes_per_second", "Rate over the link in steps that miss blocks", False),
    ("cpu_load_byte_per_s", "cpu_attention_bytes_per_second", "Rate at which the CPU attends in such steps", False),
    ("num_cpu_expert_layers", "num_cpu_expert_layers", "Layers whose experts are in CPU memory", False),
    ("cpu_expert_bytes", "cpu_expert_bytes", "Bytes of experts in CPU memory", False),
    ("num_cpu_computed_layers", "cpu_expert_layers", "Layers whose experts the CPU has computed", True),
    ("num_streamed_expert_layers", "streamed_expert_layers", "Layers whose experts were copied to the GPU", True),
    ("num_disk_extents", "disk_extents", "Pieces of prompts and states on disk, of this model", False),
    ("num_disk_bytes", "disk_bytes", "Bytes in use below kv_disk_path", False),
    ("num_disk_stored_bytes", "disk_stored_bytes", "Bytes of KV and states written to disk", True),
    ("num_disk_loaded_bytes", "disk_loaded_bytes", "Bytes of KV and states read from disk", True),
    ("num_disk_hit_tokens", "disk_hit_tokens", "Tokens of prompts that were read from disk", True),
    ("num_disk_hit_states", "disk_hit_states", "States of sequences that were read from disk", True),
    ("num_disk_misses", "disk_misses", "Files that were damaged or had vanished", True),
    ("num_disk_failures", "disk_failures", "Pieces of prompts that a bug kept from being stored or loaded", True),
    ("num_dropped_extents", "disk_dropped_extents", "Pieces of prompts that were not written", True),
    ("num_cancelled_disk_loads", "disk_cancelled_loads", "Loads that were cancelled because the disk hung", True),
    ("disk_read_byte_per_s", "disk_read_bytes_per_second", "Mean rate of reading", False),
    ("disk_write_byte_per_s", "disk_write_bytes_per_second", "Mean rate of writing", False),
    ("num_guesses", "spec_decode_num_draft_tokens", "Draft tokens", True),
    ("num_accepted_guesses", "spec_decode_num_accepted_tokens", "Accepted draft tokens", True),
    ("guess_acceptance", "spec_decode_draft_acceptance_rate", "Share of draft tokens that were accepted", False),
    ("tokens_per_pass", "spec_decode_tokens_per_pass", "Mean number of tokens per verification step", False),
)


logger = logging.getLogger(__name__)


class Metrics(Collector):
    """Counts what the server answers and refuses, and reads the engine's stats when the metrics are rendered.

    stats: returns the engine's stats, or raises EngineError if the engine has failed. num_in_queue: returns the number
    of answers that wait for their first token. replica: the engine's name, which labels every sample, or None if there
    is only one engine.
    """

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], Mapping[str, Any]],
        num_in_queue: Callable[[], int],
        replica: str | None = None,
    ) -> None:
        self._stats, self._num_in_queue = stats, num_in_queue
        self._registry = CollectorRegistry(auto_describe=False)
        self._labels = {"model_name": model_name} | ({} if replica is None else {"replica": replica})
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts, including cached tokens")
        self._generation_tokens = self._counter("generation_tokens", "Tokens of answers that have ended")
        self._cached_tokens = self._counter("prefix_cache_hits", "Tokens of prompts found in the prefix cache")
        self._finished = self._counter("request_success", "Answers that have ended", "finished_reason")
        self._checks = self._counter("answer_checks", "Answers that were recomputed while idle (verify_share)")
        self._check_differences = self._counter("answer_check_differences", "Recomputed answers that had other tokens")
        self._refused = self._counter("requests_refused", "Requests that were refused", "reason")
        self._ttft_s = self._histogram("time_to_first_token_seconds", "From arrival to the first token", _FIRST_TOKEN_S)
        self._tpot_s = self._histogram("time_per_output_token_seconds", "Mean between an answer's tokens", _TOKEN_S)
        self._registry.register(self)

    def _counter(self, name: str, about: str, *more_labels: str) -> Counter:
        """Make a counter of this server. Each use of the counter gives the values of `more_labels`."""
        counter = Counter(PREFIX + name, about, [*self._labels, *more_labels], registry=self._registry)
        return counter if more_labels else counter.labels(**self._labels)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(PREFIX + name, about, list(self._labels), registry=self._registry, buckets=buckets)
        return histogram.labels(**self._labels)

    def render(self) -> bytes:
        """Return all metrics in the format that CONTENT_TYPE names."""
        return generate_latest(self._registry)

    # -- what happens to requests --------------------------------------------------------------------------------

    def answer_ended(self, output: RequestOutput) -> None:
        self._finished.labels(**self._labels, finished_reason=output["finish_reason"]).inc()
        self._prompt_tokens.inc(output["num_prompt_tokens"])
        self._cached_tokens.inc(output["num_cached_tokens"])
        self._generation_tokens.inc(len(output["token_ids"]))
        if output["ttft_s"] is not None:
            self._ttft_s.observe(output["ttft_s"])
        if output["tpot_s"] is not None:
            self._tpot_s.observe(output["tpot_s"])

    def answers_abandoned(self, num_answers: int) -> None:
        """Count answers whose client has disconnected, or that the server has aborted, without their tokens."""
        self._finished.labels(**self._labels, finished_reason="abort").inc(num_answers)

    def answer_checked(self, is_same: bool) -> None:
        self._checks.inc()
        self._check_differences.inc(not is_same)

    def refused(self, reason: str) -> None:
        self._refused.labels(**self._labels, reason=reason).inc()

    # -- the engine ----------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's metrics, for prometheus_client. An engine that has failed has no stats."""
        yield self._metric(GaugeMetricFamily, "num_answers_in_queue", "Answers without a token", self._num_in_queue())
        try:
            stats = self._stats()
        except EngineError:
            yield self._metric(GaugeMetricFamily, "engine_is_running", "1 if the engine works, 0 if it has failed", 0)
            return
        yield self._metric(GaugeMetricFamily, "engine_is_running", "1 if the engine works, 0 if it has failed", 1)
        yield self._metric(GaugeMetricFamily, "kv_cache_usage_perc", "Share of blocks in use, 0 to 1", _usage(stats))
        for entry, name, about, is_counter in _FIGURES:
            if (value := stats.get(entry)) is not None:
                yield self._metric(CounterMetricFamily if is_counter else GaugeMetricFamily, name, about, value)
        yield from self._drafters(stats.get("drafters", {}))

    def _drafters(self, drafters: Mapping[str, Any]) -> Iterator[Metric]:
        labels = [*self._labels, "drafter"]
        guesses = CounterMetricFamily(PREFIX + "spec_decode_drafter_tokens", "Draft tokens of a drafter", labels=labels)
        about = "Share of verification steps that accepted a drafter's token at this position"
        shares = GaugeMetricFamily(PREFIX + "spec_decode_acceptance_rate_per_pos", about, labels=[*labels, "position"])
        for name, figures in drafters.items():
            values = [*self._labels.values(), name]
            guesses.add_metric(values, figures["num_guesses"])
            for position, share in enumerate(figures["accepted_by_position"]):
                shares.add_metric([*values, str(position)], share)
        yield from (guesses, shares) if drafters else ()

    def _metric(self, kind: Any, name: str, about: str, value: float) -> Metric:
        family = kind(PREFIX + name, about, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


def _usage(stats: Mapping[str, Any]) -> float:
    """Return the share of the KV cache's blocks that requests use. With offload, all blocks are in CPU memory."""
    place = "cpu" if "num_cpu_blocks" in stats else "gpu"
    num_blocks = stats.get(f"num_{place}_blocks", 0)
    return 1 - stats.get(f"num_free_{place}_blocks", 0) / num_blocks if num_blocks else 0.0


async def log_throughput(stats: Callable[[], Mapping[str, Any]], interval_s: float = LOG_INTERVAL_S) -> None:
    """Log a line every `interval_s` while the engine has work. Return when the engine fails."""
    last = stats()
    while True:
        await asyncio.sleep(interval_s)
        try:
            now = stats()
        except EngineError:
            return
        prefill, decode = (now[name] - last[name] for name in ("num_prefill_tokens", "num_decode_tokens"))
        if prefill or decode or now["num_running"] or now["num_waiting"]:
            logger.info(
                "nanovllm: prompts %.0f tok/s, answers %.1f tok/s; running: %d, waiting: %d; KV cache %.0f%% in use",
                *(prefill / interval_s, decode / interval_s, now["num_running"], now["num_waiting"]),
                100 * _usage(now),
            )
        last = now
