"""LLMEngine: requests in, outputs out; start-up and shutdown of everything between.

One step: plan it, enqueue it on every rank, and hand the tokens of the step before back to the scheduler. On a GPU
the host so works one step ahead of it; on the CPU a step has run when it is enqueued, and its own tokens are read.

Any thread may call any method. One thread at a time runs a step (turns.py); requests that are added or aborted
meanwhile take effect when it ends. An exception inside a step leaves plans that were made and never run, and an index
that vouches for K and V never written, so the engine refuses all further use; an exception that belongs to one request
ends that request alone.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm.capacity.plan_check import check_start
from nanovllm.capacity.plan_table import plan_table
from nanovllm.capacity.planner import make_plan
from nanovllm.checkpoint.files import fetch_weights
from nanovllm.checkpoint.generation_config import read_sampling_defaults
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.core.kv_spec import KVCacheSizes
from nanovllm.core.outputs import Outbox, StepOutput, request_output
from nanovllm.core.sequence import Sequence, TokenIds
from nanovllm.core.step_limits import max_model_len
from nanovllm.core.step_plan import StepPlan
from nanovllm.device.devices import (
    release_failed_start,
    resolve_device,
)
from nanovllm.engine.link_meter import LinkMeter
from nanovllm.engine.startup import (
    check_backend,
    find_machine,
)
from nanovllm.engine.turns import Turns
from nanovllm.errors import ConfigError, EngineError, RequestError
from nanovllm.executor.processes import WorkerGroup
from nanovllm.kvcache.policy.base import KVCacheManager
from nanovllm.kvcache.policy.block_manager import BlockManager
from nanovllm.kvcache.policy.hybrid_manager import HybridKVCacheManager
from nanovllm.runner.model_runner import make_runner
from nanovllm.runner.step_result import StepResult
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.scheduler import Scheduler
from nanovllm.text.detokenizer import Detokenizer, TokenDecoder
from nanovllm.text.request_check import Prompt, check_token_ids, encode_text, text_or_token_ids
from nanovllm.text.tokenizer import (
    end_token_ids,
    load_tokenizer,
)
from nanovllm.utils.interrupt import deferred_interrupt
from nanovllm.utils.memory import format_bytes

logger = logging.getLogger("nanovllm")


@dataclass(slots=True)
class _Request:
    """What the engine keeps for an unfinished request in addition to its Sequence."""

    outbox: Outbox  # belongs to the call that waits for it
    detokenizer: Detokenizer | None


class LLMEngine:
    def __init__(self, model: str | Path, **options: Any) -> None:
        """`model`: directory, hub name or preset; `options`: the fields of Config. Raises ConfigError for bad ones, and
        for an engine that does not fit in memory; whatever is raised, nothing is left behind.
        """
        known = {f.name for f in fields(Config)} - {"model"}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(f"unknown option {', '.join(unknown)}; the options are {', '.join(sorted(known))}")
        self.config = Config(model=str(model), **options)
        self.model_config, self._directory = ModelConfig.from_pretrained(self.config.model, self.config.hf_overrides)
        use_defaults = self.config.generation_config == "auto"
        self.sampling_defaults = read_sampling_defaults(self._directory) if use_defaults else {}
        self.max_model_len = max_model_len(self.config, self.model_config)
        self.device = resolve_device(self.config)
        check_backend(self.config, self.model_config, self.device)
        self.plan = make_plan(
            self.config, self.model_config, find_machine(replace(self.config, device=str(self.device)))
        )
        check_start(self.plan)
        self._turns = Turns()
        self._closed_because: str | None = None  # why the engine can no longer be used
        self._encode_lock = threading.Lock()  # a tokenizer encodes for one thread at a time
        self._request_ids = itertools.count()
        self._requests: dict[int, _Request] = {}
        self._outbox = Outbox()  # for requests from `add_request`, whose outputs `step` returns
        self._in_flight: tuple[StepPlan, StepResult] | None = None
        self._num_steps = 0
        try:
            self._start()
        except BaseException as error:
            self.close()
            release_failed_start(error, self.device)
            raise

    # -- start and end -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self.tokenizer = load_tokenizer(self._directory)
        self._token_decoders: dict[bool, TokenDecoder] = {}  # by skip_special_tokens
        if self.tokenizer is not None:
            self._token_decoders = {skip: TokenDecoder(self.tokenizer, skip) for skip in (True, False)}
        if self.config.load_format != "dummy":
            fetch_weights(self.config.model, self._directory)
        factory = partial(make_runner, self.config, self.model_config, self._directory, self.device)
        self._ranks = WorkerGroup(factory, self.config.tensor_parallel_size, self.device.type)
        self.runner = self._ranks.runner
        self._needs_rope_lens = self.runner.model.needs_rope_lens
        sizes = self._kv_cache_sizes()
        self._ranks.run("allocate_kv_cache", sizes)
        if self.device.type == "cuda" and not self.config.enforce_eager:
            self._ranks.run("capture_graphs", sizes.num_gpu_blocks)
        if self.device.type == "cuda":
            self._ranks.run("freeze_objects")
        self.scheduler = self._make_scheduler(sizes)
        num_kv_tokens = (sizes.num_cpu_blocks or sizes.num_gpu_blocks) * self.config.block_size
        self.max_request_tokens = min(self.max_model_len, num_kv_tokens + 1)  # the last token needs no K and V
        logger.info("started in %s", self.runner.phases)
        self._link_meter = LinkMeter(self.runner.spec.block_bytes, self.runner.spec.block_size)
        if self.config.enable_cpu_offload:
            self._log_plan()

    def _make_scheduler(self, sizes: KVCacheSizes) -> Scheduler:
        config, spec = self.config, self.runner.spec
        kv: KVCacheManager
        if config.enable_cpu_offload:
            kv = HybridKVCacheManager(
                sizes.num_cpu_blocks,
                sizes.num_gpu_blocks,
                config.block_size,
                spec.staging_group_blocks,
                config.enable_prefix_caching,
            )
        else:
            kv = BlockManager(sizes.num_gpu_blocks, config.block_size, config.enable_prefix_caching)
        return Scheduler(
            kv,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            chunked_prefill=config.chunked_prefill,
            eos_token_ids=end_token_ids(self.model_config, self.tokenizer),
        )

    def _kv_cache_sizes(self) -> KVCacheSizes:
        """The user's numbers of blocks, or what start-up finds room for. Raises ConfigError where they do not fit.

        On the CPU, where memory is not divided in advance, the user's numbers are taken as they are.
        """
        config, num_cpu_blocks = self.config, self.plan.num_cpu_blocks
        name, least = ("num_gpu_blocks", 2) if config.enable_cpu_offload else ("num_kvcache_blocks", 1)
        given = max(getattr(config, name) or 0, 0)
        if given and self.device.type == "cpu":
            return KVCacheSizes(given, num_cpu_blocks)
        useful = config.max_num_seqs * -(-self.max_model_len // config.block_size)
        if config.enable_cpu_offload:
            useful = max(2, min(useful, num_cpu_blocks))
        fitting, room = self._ranks.run("measure_num_gpu_blocks", num_cpu_blocks, given or useful)
        if fitting < max(given, least):
            lower = f"lower {name} to {fitting}" if fitting >= least else "lower kvcache_block_size"
            raise ConfigError(
                f"the GPU has no room for {name}={max(given, least)} blocks of "
                f"{format_bytes(self.runner.spec.block_bytes)}: {room}; {lower}, lower max_num_batched_tokens or "
                "max_num_seqs, raise gpu_memory_utilization, or use a smaller model or more ranks"
            )
        return KVCacheSizes(given or min(fitting, useful), num_cpu_blocks)

    def _log_plan(self) -> None:
        """The plan once more, with what start-up measured."""
        stats = self.stats()
        machine = self.plan.machine.with_link(stats["link_byte_per_s"], "measured")
        self.plan = make_plan(self.config, self.model_config, machine, num_gpu_blocks=stats["num_gpu_blocks"])
        logger.info("%s", plan_table(self.plan))

    def close(self) -> None:
        """Stop the workers and give all memory back. The engine cannot be used afterwards; closing twice is fine."""
        with deferred_interrupt() as held:
            try:
                with held.second_acts_at_once():
                    self._turns.begin()  # a step of another thread ends first
                    self._close()
            finally:
                self._turns.end()

    def _close(self) -> None:
        self._closed_because = self._closed_because or "it is closed"
        ranks = vars(self).pop("_ranks", None)
        if ranks is None:
            return
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None and self.config.tensor_parallel_size > 1:
            with suppress(EngineError):  # the GPU would wait forever for a rank that died in the step
                ranks.wait_for(in_flight[1].is_done)
        try:
            self.runner.close()
        finally:
            ranks.close()  # the workers' memory goes with their processes

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed_because is not None:
            raise EngineError(f"the engine cannot be used: {self._closed_because}; make a new one")

    @contextmanager
    def _closed_by_errors(self) -> Iterator[None]:
        """Refuse all further use after any exception: it is unknown which of the planned K and V were written."""
        try:
            yield
        except BaseException as error:
            self._closed_because = self._closed_because or f"a step failed with {type(error).__name__}: {error}"
            raise

    # -- requests ------------------------------------------------------------------------------------------------

    def check_request(self, prompt: Prompt, params: SamplingParams) -> TokenIds:
        """The prompt's token ids, int64. Raises RequestError for a request that can never run."""
        prompt = text_or_token_ids(prompt)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("a text prompt needs a tokenizer, and this model has none; give a list of token ids")
            with self._encode_lock:
                token_ids = encode_text(self.tokenizer, prompt, self.model_config.vocab_size)
        else:
            token_ids = check_token_ids(prompt, self.model_config.vocab_size)
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params has type {type(params).__name__}, expected SamplingParams")
        if not token_ids:
            raise RequestError("the prompt is empty; it needs at least one token")
        if len(token_ids) + (params.max_tokens or 1) > self.max_model_len:
            raise RequestError(
                f"prompt of {len(token_ids)} tokens + max_tokens={params.max_tokens or 1} exceeds "
                f"max_model_len={self.max_model_len}; shorten the prompt, lower max_tokens or raise max_model_len"
            )
        if unknown := [t for t in params.stop_token_ids or () if t >= self.model_config.vocab_size]:
            last = self.model_config.vocab_size - 1
            raise RequestError(f"stop_token_ids {unknown} are outside the vocabulary 0..{last}; leave them out")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        return token_ids

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams) -> int:
        """Queue a request and return its id. Raises RequestError, leaving all else untouched, when it can never run."""
        return self._queue(self.check_request(prompt, sampling_params), sampling_params, self._outbox)

    def _queue(self, token_ids: TokenIds, sampling_params: SamplingParams, outbox: Outbox) -> int:
        """Queue a request that `check_request` has let through; what it brings goes to `outbox`."""
        self._check_open()
        request_id = next(self._request_ids)
        drawn = (self.config.seed * 1_000_003 + request_id) & (2**63 - 1)
        seed = drawn if sampling_params.seed is None else sampling_params.seed
        if sampling_params.max_tokens is None:
            num_new_tokens = max(1, self.max_request_tokens - len(token_ids))
            sampling_params = replace(sampling_params, max_tokens=num_new_tokens)
        salt = len(token_ids) if self._kv_depends_on_prompt_len(len(token_ids)) else 0
        seq = Sequence(request_id, token_ids, sampling_params, seed, salt)
        self.scheduler.check_fits(seq)
        detokenizer = None
        if self._token_decoders and sampling_params.detokenize:
            decoder = self._token_decoders[sampling_params.skip_special_tokens]
            stop = tuple(sampling_params.stop or ())
            detokenizer = Detokenizer(decoder, stop, sampling_params.include_stop_str_in_output)
        with deferred_interrupt():
            self._requests[request_id] = _Request(outbox, detokenizer)
            self._turns.call(partial(self._add, seq))
        return request_id

    def _add(self, seq: Sequence) -> None:
        if self._closed_because is None:
            with self._closed_by_errors():
                self.scheduler.add(seq)

    def _kv_depends_on_prompt_len(self, num_prompt_tokens: int) -> bool:
        """Dynamic rope rotates keys by the prompt's length once past the original one: no sharing across lengths."""
        original = self.model_config.rope.original_max_position_embeddings
        return self._needs_rope_lens and num_prompt_tokens > original

    def abort(self, request_id: int) -> bool:
        """End a request: at once, or when the running step ends. False when it has ended already or never was.

        Its output, with what it has generated, comes with finish_reason "abort".
        """
        if self._closed_because is not None or request_id not in self._requests:
            return False
        with deferred_interrupt():
            self._turns.call(partial(self._abort, request_id))
        return True

    def _abort_all(self, outbox: Outbox) -> None:
        """End the requests of a call that is left, those included whose ids it never got."""
        with deferred_interrupt():
            for request_id, request in self._requests.copy().items():
                if request.outbox is outbox:
                    self.abort(request_id)

    def _abort(self, request_id: int) -> None:
        if self._closed_because is not None:
            return
        with self._closed_by_errors():
            request = self._requests.pop(request_id, None)
            seq = self.scheduler.abort(request_id)
            if request is not None and seq is not None:
                text = request.detokenizer.text if request.detokenizer is not None else None
                request.outbox.content.finished[request_id] = request_output(seq, text)

    def is_finished(self) -> bool:
        """Whether every request has ended, and `step` has returned the outputs that are its to return."""
        return not self._requests and not self._outbox

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self) -> StepOutput:
        """Run the next step (one ahead of the tokens returned, on a GPU). Returns what has come since the last call
        for requests from `add_request`. Raises EngineError when a worker died or an earlier step failed.
        """
        self._take_step()
        with self._turns.lock:
            return self._outbox.fetch()

    def _next_output(self, outbox: Outbox) -> StepOutput:
        """What has come for the requests of `outbox`. Runs a step, or waits for another thread's, if nothing has."""
        self._take_step(unless=lambda: bool(outbox))
        with self._turns.lock:
            return outbox.fetch()

    def _take_step(self, unless: Callable[[], bool] | None = None) -> None:
        """Run one step in this thread's turn, unless `unless()` comes true while it waits for that."""
        with deferred_interrupt() as held:
            try:
                with held.second_acts_at_once():
                    if not self._turns.begin(unless):
                        return
                    self._check_open()
                    with self._closed_by_errors():
                        self._run_step()
            finally:
                self._turns.end()

    def _run_step(self) -> None:
        plan = self.scheduler.schedule()
        launched = None
        if plan is not None:
            launched = plan, self._ranks.run("launch", plan)
            self._num_steps += 1
        elif self._in_flight is None and self.scheduler.has_unfinished:
            raise AssertionError("requests are waiting, and none of them can run")
        if self.device.type == "cpu":
            self._in_flight, launched = launched, None
        done, self._in_flight = self._in_flight, launched
        if done is not None:
            self._commit(*done)

    def _commit(self, plan: StepPlan, result: StepResult) -> None:
        """Hand the tokens of a step to the scheduler, then what they bring to the callers that wait for it."""
        if self.config.tensor_parallel_size > 1:
            self._ranks.wait_for(result.is_done)  # a dead rank would be waited for forever
        token_ids = result.token_ids()
        self._link_meter.step_ended(plan)
        updated = self.scheduler.commit(plan, token_ids)
        pieces = [(seq, self._detokenize(seq)) for seq in updated]
        with self._turns.lock:
            self._count_tokens(plan)
            for seq, text in pieces:
                self._deliver(seq, text)
        if not self.scheduler.has_unfinished:
            self._link_meter.pause()

    def _detokenize(self, seq: Sequence) -> str | None:
        """The text that a sequence's new token brings; it may end the sequence. An error here ends this one alone."""
        detokenizer = self._requests[seq.seq_id].detokenizer
        if detokenizer is None:
            return None
        new_token_ids = seq.token_ids[-1:] if seq.error is None else ()
        error = None
        try:
            finished, at_end_token = seq.finish_reason is not None, seq.finish_reason == "stop"
            text = detokenizer.update(new_token_ids, finished, at_end_token)
        except Exception as raised:
            text, error = "", f"its text could not be decoded: {type(raised).__name__}: {raised}"
        if error is None and not detokenizer.stopped:
            return text
        reason = "stop" if error is None else "error"
        if seq.finish_reason is None:
            self.scheduler.finish(seq, reason, error)
        elif seq.finish_reason != "error":
            seq.finish_reason, seq.error = reason, error
        return text

    def _count_tokens(self, plan: StepPlan) -> None:
        """Tell each caller how many tokens of its requests the step ran."""
        for step in plan.sequences:
            request = self._requests.get(step.seq_id)
            if request is None:
                continue  # aborted while the step ran
            content = request.outbox.content
            if step.sampling is not None and step.num_tokens == 1:
                content.num_decode_tokens += 1
            else:
                content.num_prefill_tokens += step.num_tokens

    def _deliver(self, seq: Sequence, text: str | None) -> None:
        request = self._requests[seq.seq_id]
        if text is not None:
            request.outbox.content.add_text(seq.seq_id, text)
        if seq.finish_reason is not None:
            whole = request.detokenizer.text if request.detokenizer is not None else None
            request.outbox.content.finished[seq.seq_id] = request_output(seq, whole)
            del self._requests[seq.seq_id]

    def stats(self) -> dict[str, Any]:
        """Counters since the start: blocks, bytes moved, preemptions; bytes in *_bytes, rates in their unit.

        With offload also, of rank 0: link_byte_per_s, measured at start (None on a CPU); load_byte_per_s, what streamed
        decode steps loaded over their time (None before the second of them; see LinkMeter); link_share, the second of
        the first.
        """
        self._check_open()
        stats: dict[str, Any] = {
            "num_steps": self._num_steps,
            "num_waiting": len(self.scheduler.waiting),
            "num_running": len(self.scheduler.running),
            "num_preemptions": self.scheduler.num_preemptions,
            "block_bytes": self.runner.spec.block_bytes,
        }
        stats |= self.scheduler.kv.stats() | self.runner.stats()
        if self.config.enable_cpu_offload:
            stats |= self._link_meter.stats(stats["link_byte_per_s"])
        return stats
