"""LLMEngine: requests in, outputs out; start-up and shutdown of everything between.

One step: plan it, enqueue it on every rank, and hand the tokens of the step before back to the scheduler. On a GPU
the host so works one step ahead of it; on the CPU a step has run when it is enqueued, and its own tokens are read.
"""

import itertools
import logging
from array import array
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nanovllm.config import Config, KVCacheSizes
from nanovllm.engine.batch import StepPlan
from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.model_runner import StepResult
from nanovllm.engine.outputs import StepOutput, request_output
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, TokenIds
from nanovllm.engine.startup import find_machine, load_tokenizer, make_runner, resolve_device
from nanovllm.engine.tp_worker import WorkerGroup
from nanovllm.errors import EngineError
from nanovllm.kvcache.base import KVCacheManager
from nanovllm.kvcache.block_manager import BlockManager
from nanovllm.kvcache.hybrid_manager import HybridKVCacheManager
from nanovllm.kvcache.link import LinkMeter
from nanovllm.model_config import ModelConfig
from nanovllm.plan import max_model_len
from nanovllm.plan_check import check_start
from nanovllm.planner import make_plan
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.memory import format_bytes

logger = logging.getLogger("nanovllm")


class LLMEngine:
    def __init__(self, model: str | Path, **options: Any) -> None:
        """`model`: directory, hub name or preset; `options`: the fields of Config. Raises ValueError for bad ones."""
        known = {f.name for f in fields(Config)} - {"model"}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ValueError(f"unknown option {', '.join(unknown)}; the options are {', '.join(sorted(known))}")
        self.config = Config(model=str(model), **options)
        self.model_config, self._directory = ModelConfig.from_pretrained(self.config.model, self.config.hf_overrides)
        self.max_model_len = max_model_len(self.config, self.model_config)
        self.device = resolve_device(self.config)
        self.plan = make_plan(
            self.config, self.model_config, find_machine(replace(self.config, device=str(self.device)))
        )
        check_start(self.plan)
        self._closed = False
        factory = partial(make_runner, self.config, self.model_config, self._directory, self.device)
        self._ranks = WorkerGroup(factory, self.config.tensor_parallel_size, self.device.type)
        self.runner = self._ranks.runner
        try:
            self.tokenizer = load_tokenizer(self._directory)
            self.scheduler = self._make_scheduler()
        except BaseException:
            self.close()
            raise
        self._request_ids = itertools.count()
        self._detokenizers: dict[int, Detokenizer] = {}
        self._in_flight: tuple[StepPlan, StepResult] | None = None
        self._num_steps = 0
        self._link_meter = LinkMeter(self.runner.spec.block_bytes, self.runner.spec.block_size)
        if self.config.enable_cpu_offload:
            self._log_plan()

    # -- start and end -------------------------------------------------------------------------------------------

    def _make_scheduler(self) -> Scheduler:
        sizes = self._kv_cache_sizes()
        self._ranks.run("allocate_kv_cache", sizes)
        if self.device.type == "cuda" and not self.config.enforce_eager:
            self._ranks.run("capture_graphs")
        if self.device.type == "cuda":
            self._ranks.run("freeze_objects")
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
            eos_token_ids=self.model_config.eos_token_ids,
        )

    def _kv_cache_sizes(self) -> KVCacheSizes:
        """The user's numbers of blocks, or what start-up measures."""
        config, block_size = self.config, self.config.block_size
        given = config.num_gpu_blocks if config.enable_cpu_offload else config.num_kvcache_blocks
        if given is not None and given > 0:
            return KVCacheSizes(given, self.plan.num_cpu_blocks)
        useful = config.max_num_seqs * -(-self.max_model_len // block_size)
        if config.enable_cpu_offload:
            useful = max(2, min(useful, self.plan.num_cpu_blocks))
        fitting = self._ranks.run("measure_num_gpu_blocks")
        if fitting < (2 if config.enable_cpu_offload else 1):
            raise ValueError(
                f"no room for KV blocks of {format_bytes(self.runner.spec.block_bytes)} beside the model with "
                f"gpu_memory_utilization={config.gpu_memory_utilization}; raise it, lower max_num_batched_tokens or "
                "kvcache_block_size, or use a smaller model or more ranks"
            )
        return KVCacheSizes(min(fitting, useful), self.plan.num_cpu_blocks)

    def _log_plan(self) -> None:
        """The plan once more, with what start-up measured."""
        stats = self.stats()
        machine = self.plan.machine.with_link(stats["link_byte_per_s"], "measured")
        self.plan = make_plan(self.config, self.model_config, machine, num_gpu_blocks=stats["num_gpu_blocks"])
        logger.info("%s", self.plan)

    def close(self) -> None:
        """Stop the workers and give all memory back. The engine cannot be used afterwards; closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        self.runner.close()
        self._ranks.close()  # the workers' memory goes with their processes

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- requests ------------------------------------------------------------------------------------------------

    def check_request(self, prompt: str | list[int], params: SamplingParams) -> TokenIds:
        """The prompt's token ids, int64. Raises ValueError for a request that can never run."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("a text prompt needs a tokenizer, and this model has none; give a list of token ids")
            token_ids = array("q", self.tokenizer.encode(prompt))
        else:
            token_ids = _check_token_ids(prompt, self.model_config.vocab_size)
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params has type {type(params).__name__}, expected SamplingParams")
        if not token_ids:
            raise ValueError("the prompt is empty; it needs at least one token")
        if len(token_ids) + params.max_tokens > self.max_model_len:
            raise ValueError(
                f"prompt of {len(token_ids)} tokens + max_tokens={params.max_tokens} exceeds "
                f"max_model_len={self.max_model_len}; shorten the prompt, lower max_tokens or raise max_model_len"
            )
        if unknown := [t for t in params.stop_token_ids if t >= self.model_config.vocab_size]:
            last = self.model_config.vocab_size - 1
            raise ValueError(f"stop_token_ids {unknown} are outside the vocabulary 0..{last}; leave them out")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        return token_ids

    def add_request(self, prompt: str | list[int], sampling_params: SamplingParams) -> int:
        """Queue a request and return its id. Raises ValueError, leaving all else untouched, when it can never run."""
        return self._queue(self.check_request(prompt, sampling_params), sampling_params)

    def _queue(self, token_ids: TokenIds, sampling_params: SamplingParams) -> int:
        """Queue a request that `check_request` has let through."""
        self._check_open()
        request_id = next(self._request_ids)
        drawn = self.config.seed * 1_000_003 + request_id
        seed = (drawn if sampling_params.seed is None else sampling_params.seed) & (2**63 - 1)
        salt = len(token_ids) if self._kv_depends_on_prompt_len(len(token_ids)) else 0
        self.scheduler.add(Sequence(request_id, token_ids, sampling_params, seed, salt))
        if self.tokenizer is not None:
            self._detokenizers[request_id] = Detokenizer(self.tokenizer, tuple(sampling_params.stop))
        return request_id

    def _kv_depends_on_prompt_len(self, num_prompt_tokens: int) -> bool:
        """Dynamic rope turns keys by the prompt's length once past the original one: no sharing across lengths."""
        original = self.model_config.rope.original_max_position_embeddings
        return self.runner.model.needs_rope_lens and num_prompt_tokens > original

    def abort(self, request_id: int) -> bool:
        """End a request now; its blocks are free at once. False when it has ended already or never was."""
        self._detokenizers.pop(request_id, None)
        return self.scheduler.abort(request_id) is not None

    def is_finished(self) -> bool:
        return not self.scheduler.has_unfinished

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self) -> StepOutput:
        """Run the next step (one ahead of the tokens returned, on a GPU). Raises EngineError when a worker died."""
        self._check_open()
        output = StepOutput()
        plan = self.scheduler.schedule()
        launched = None
        if plan is not None:
            launched = plan, self._ranks.run("launch", plan)
            self._num_steps += 1
        elif self._in_flight is None and self.scheduler.has_unfinished:
            raise AssertionError("requests are waiting, and none of them can run")
        if self.device.type == "cpu":
            self._in_flight, launched = launched, None
        if self._in_flight is not None:
            self._commit(*self._in_flight, output)
        self._in_flight = launched
        return output

    def _commit(self, plan: StepPlan, result: StepResult, output: StepOutput) -> None:
        if self.config.tensor_parallel_size > 1:
            self._ranks.wait_for(result.is_done)  # a dead rank would be waited for forever
        for step in plan.sequences:
            if step.sampling is not None and step.num_tokens == 1:
                output.num_decode_tokens += 1
            else:
                output.num_prefill_tokens += step.num_tokens
        token_ids = result.token_ids()
        self._link_meter.step_ended(plan)
        for seq in self.scheduler.commit(plan, token_ids):
            self._collect(seq, output)
        if not self.scheduler.has_unfinished:
            self._link_meter.pause()

    def _collect(self, seq: Sequence, output: StepOutput) -> None:
        detokenizer = self._detokenizers.get(seq.seq_id)
        text = None
        if detokenizer is not None:
            answer = seq.token_ids[seq.num_prompt_tokens :]
            output.texts[seq.seq_id] = detokenizer.update(answer, seq.finish_reason is not None)
            text = detokenizer.text
            if detokenizer.stopped and seq.finish_reason is None:
                self.scheduler.finish(seq, "stop")
            elif detokenizer.stopped:
                seq.finish_reason = "stop"
        if seq.finish_reason is not None:
            output.finished[seq.seq_id] = request_output(seq, text)
            self._detokenizers.pop(seq.seq_id, None)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed; make a new one")

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


def _check_token_ids(prompt: Any, vocab_size: int) -> TokenIds:
    if not isinstance(prompt, list | tuple):
        raise ValueError(f"a prompt has type {type(prompt).__name__}, expected a string or a list of token ids")
    if set(map(type, prompt)) - {int}:
        position, token_id = next((i, t) for i, t in enumerate(prompt) if type(t) is not int)
        raise ValueError(f"token_ids[{position}]={token_id!r} is no integer; a prompt is a string or token ids")
    with suppress(OverflowError):  # an id of more than 64 bits
        token_ids = array("q", prompt)
        if not token_ids or np.frombuffer(token_ids, dtype=np.uint64).max() < vocab_size:  # a negative one is huge
            return token_ids
    position, token_id = next((i, t) for i, t in enumerate(prompt) if not 0 <= t < vocab_size)
    raise ValueError(f"token_ids[{position}]={token_id} is outside the vocabulary 0..{vocab_size - 1}")
