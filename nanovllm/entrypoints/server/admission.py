"""Service: the state that all endpoints share. A Service submits requests to the engine, and limits how many answers
wait and how long.

An answer waits until its first token arrives. The engine itself limits the number of running answers (max_num_seqs).
RequestLimits limits what one request can ask for, so that no client keeps the server busy with a single body.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from nanovllm.async_llm import AsyncLLM
from nanovllm.entrypoints.server.errors import (
    CONTEXT_EXCEEDED,
    PromptTooLongError,
    Refusal,
    model_not_found,
    too_long_message,
)
from nanovllm.entrypoints.server.gate import CACHE_SALT
from nanovllm.entrypoints.server.metrics import Metrics
from nanovllm.entrypoints.server.options import ServerOptions
from nanovllm.entrypoints.server.protocol import SamplingFields
from nanovllm.entrypoints.server.request_log import RequestRecord
from nanovllm.errors import ConfigError, EngineError
from nanovllm.llm import LLM
from nanovllm.plan.kv_spec import dtype_name
from nanovllm.plan.outputs import RequestOutput, TokenLogprobs
from nanovllm.request_stream import RequestStream
from nanovllm.sampling_params import MAX_LOGPROBS, SamplingParams
from nanovllm.text.frontend import Prompt

CHARS_PER_TOKEN = 16  # few texts have more; without a limit, tokenizing a text that cannot fit takes seconds
MAX_N = 128  # answers to one prompt
MAX_STOP = 64  # stop strings; every step searches for each of them
MAX_LIST_ITEMS = 4096  # in every other list
MIN_TOTAL_LOGPROBS = 1 << 22  # per request, about 60 bytes of JSON each; longer contexts raise this limit
MAX_RETRY_AFTER_S = 60.0
_NEWEST_WAIT_SHARE = 0.1  # the newest wait's weight in the running mean
TIES = {"float32": 0.002, "bfloat16": 0.25, "float16": 0.032}  # two units in the last place of a logit from 16 to 32
MAX_CHECKS = 16  # answers that wait to be checked; no more answers are drawn while the queue is full
IDLE_S = 0.2  # time without open answers before a check begins
_CHECK_SALT = "a check of an answer"
Result = TypeVar("Result")


class Service:
    """Used on the event loop only. `num_waiting` counts answers without a first token, `num_open` unfinished answers.

    model_names: the names by which clients may call the model. Answers carry the first name. replica: see Metrics.
    """

    def __init__(self, engine: AsyncLLM, options: ServerOptions, replica: str | None = None) -> None:
        if not options.served_model_name:
            raise ConfigError("served_model_name=() has no name for the model; give at least one")
        self.engine, self.options = engine, options
        self.model_names = options.served_model_name
        self.metrics = Metrics(self.model_names[0], engine.llm.stats, lambda: self.num_waiting, replica)
        self.started_s = int(time.time())
        self.num_waiting = self.num_open = 0
        self.checks = AnswerChecks(engine, self.metrics, options.verify_share, is_idle=lambda: not self.num_open)
        self._limits = RequestLimits(options, engine.llm.max_model_len)
        self._mean_wait_s = 1.0

    @property
    def llm(self) -> LLM:
        return self.engine.llm

    # -- before a request is queued ----------------------------------------------------------------------------------

    def check_body(self, body: BaseModel) -> None:
        """Raise ApiError for a model that is not served, and Refusal for a body that asks for too much.

        A body without a model's name means the model that is served.
        """
        name = vars(body)["model"]
        if name is not None and name not in self.model_names:
            raise model_not_found(name, self.model_names)
        with self._counted():
            self._limits.check_body(body)

    def check_chars(self, num_chars: int, param: str) -> None:
        """Raise Refusal for a text that is too long to be tokenized."""
        with self._counted():
            self._limits.check_chars(num_chars, param)

    def key_salt(self, request: Request) -> str | None:
        """Return the salt of the request's API key, if keys have salts."""
        salt: str | None = getattr(request.state, CACHE_SALT, None)
        return salt

    def cache_salt(self, body: SamplingFields, request: Request) -> str | None:
        """Join the salts of the API key and of the client. Requests share KV only if their joined salts are equal."""
        key_salt = self.key_salt(request)
        if key_salt is None or body.cache_salt is None:
            return key_salt or body.cache_salt
        return f"{key_salt} {body.cache_salt}"

    async def prepare(self, function: Callable[..., Result], *args: Any) -> Result:
        """Call a function that takes long if the prompt is long, before the request is submitted.

        The request counts as waiting during the call. Raises Refusal like `submit`.
        """
        place = self._enter(1)
        try:
            return await asyncio.to_thread(function, *args)
        finally:
            place.leave()

    # -- the queue ---------------------------------------------------------------------------------------------------

    async def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        record: RequestRecord,
        *,
        with_tokens: bool = True,
        cache_salt: str | None = None,
        param: str = "prompt",
    ) -> RequestStream:
        """Queue the prompts of a request, as AsyncLLM.submit does. Every request for an answer passes through here.

        Prompts are token ids. A max_tokens that does not fit after a prompt is lowered to what fits. param: the field
        of the body that the prompts come from. Raises PromptTooLongError for a prompt that leaves no room for an
        answer. Raises Refusal, and queues nothing, if too many answers wait already, or for too many log-probabilities.
        If no answer of the stream has begun after `max_wait_s`, the stream raises Refusal and its answers are aborted.
        """
        with self._counted():
            self._limits.check_logprobs(prompts, params)
        fitting = [self._cut_to_fit(params, len(prompt), param) for prompt in prompts]
        place = self._enter(len(prompts) * params.n)
        try:
            salted = [{"prompt_token_ids": prompt, "cache_salt": cache_salt} for prompt in prompts]
            stream = await self.engine.submit(salted, fitting, with_tokens=with_tokens)
        except BaseException:
            place.leave()
            raise
        place.watch(stream, params, record)
        return stream

    def _cut_to_fit(self, params: SamplingParams, num_prompt_tokens: int, param: str) -> SamplingParams:
        limit = self.llm.max_request_tokens
        if num_prompt_tokens >= limit:
            raise PromptTooLongError(num_prompt_tokens, limit, param)
        if params.max_tokens is None or params.max_tokens <= limit - num_prompt_tokens:
            return params
        return params.with_max_tokens(limit - num_prompt_tokens)

    def check_num_answers(self, num_answers: int) -> None:
        """Raise Refusal for more answers in one request than may ever wait."""
        if num_answers > (limit := self.options.max_queue):
            message = f"{num_answers} answers in one request are more than max_queue={limit}; ask for fewer"
            with self._counted():
                raise Refusal(400, "queue", message, param="n")

    def _enter(self, num_answers: int) -> "_Place":
        limit = self.options.max_queue
        self.check_num_answers(num_answers)
        with self._counted():
            if self.num_waiting + num_answers > limit:
                message = f"{self.num_waiting} answers are waiting, at most {limit} may wait; ask again later"
                raise Refusal(429, "queue", message, retry_after_s=self.retry_after_s)
        return _Place(self, num_answers)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except Refusal as refusal:
            self.metrics.refused(refusal.reason)
            raise

    @property
    def retry_after_s(self) -> float:
        """Return a moving average of the waits, at most a minute."""
        return min(self._mean_wait_s, MAX_RETRY_AFTER_S)

    def add_wait(self, wait_s: float) -> None:
        """Add the time that an answer has waited for its first token to the average."""
        self._mean_wait_s += _NEWEST_WAIT_SHARE * (wait_s - self._mean_wait_s)


class _Place:
    """One request's place in the queue, which observes the request's stream (StreamObserver)."""

    def __init__(self, service: Service, num_answers: int) -> None:
        self._service = service
        self._entered_s = time.monotonic()
        self._num_open = num_answers
        self._waiting = set(range(num_answers))
        self._timer: asyncio.TimerHandle | None = None
        service.num_waiting += num_answers
        service.num_open += num_answers

    def watch(self, stream: RequestStream, params: SamplingParams, record: RequestRecord) -> None:
        """Follow the stream, and end the stream if no answer begins in time."""
        stream.observer = self
        self._params, self._record = params, record
        record.queued(stream.sequences)
        loop = asyncio.get_running_loop()
        rest_s = self._entered_s + self._service.options.max_wait_s - time.monotonic()
        self._timer = loop.call_later(max(0.0, rest_s), self._expire, stream)

    def _expire(self, stream: RequestStream) -> None:
        self._timer = None
        stream.close()
        limit = f"max_wait_s={self._service.options.max_wait_s:g}"
        message = f"no token within {limit} seconds, as the server is busy; ask later"
        self._service.metrics.refused("wait")
        stream.fail(Refusal(503, "wait", message, retry_after_s=self._service.retry_after_s))

    def updated(self, index: int) -> None:
        """Hot."""
        if index in self._waiting:
            self._waiting.remove(index)
            self._service.num_waiting -= 1
            self._record.begun()
            self._service.add_wait(time.monotonic() - self._entered_s)
            self._stop_timer()

    def finished(self, output: RequestOutput) -> None:
        self._num_open -= 1
        self._service.num_open -= 1
        self._service.metrics.answer_ended(output)
        self._record.finished(output)
        self._service.checks.answer_ended(output, self._params)

    def closed(self, num_open: int) -> None:
        assert num_open == self._num_open, f"{num_open} answers are open, {self._num_open} were expected"
        self._service.metrics.answers_abandoned(num_open)
        self._record.abandoned()
        self.leave()

    def leave(self) -> None:
        """Leave the queue. The answers that are still open will not finish."""
        self._service.num_waiting -= len(self._waiting)
        self._service.num_open -= self._num_open
        self._waiting.clear()
        self._num_open = 0
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# -- what one request can ask for --------------------------------------------------------------------------------------


class RequestLimits:
    """Checks that raise Refusal for a request that asks for too much."""

    def __init__(self, options: ServerOptions, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._max_logprobs = max(MIN_TOTAL_LOGPROBS, 2 * (1 + MAX_LOGPROBS) * max_model_len)
        self.max_prompt_chars = options.max_prompt_chars or CHARS_PER_TOKEN * max_model_len

    def check_body(self, body: BaseModel) -> None:
        for name, value in vars(body).items():
            if name == "n" and (value or 1) > MAX_N:
                raise Refusal(400, name, f"n is {value}, at most {MAX_N}", param=name)
            if name in ("prompt", "tokens"):
                self._check_prompts(value, name)
            elif name == "stop" and isinstance(value, list):
                self._check_length("stop", value, name, MAX_STOP)
            elif isinstance(value, list | dict):
                self._check_length("list_items", value, name, MAX_LIST_ITEMS)

    def _check_prompts(self, given: Any, param: str) -> None:
        """Check the lengths of prompts before the engine does, which reads and perhaps decodes all token ids first."""
        is_list = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        prompts = given if is_list else [given]
        self._check_length("list_items", prompts, param, MAX_LIST_ITEMS)
        for prompt in prompts:
            if isinstance(prompt, str):
                self.check_chars(len(prompt), param)
            elif isinstance(prompt, list) and len(prompt) > self._max_model_len:
                comparison = f"{len(prompt)} tokens > {self._max_model_len - 1} maximum"
                message = too_long_message(comparison, self._max_model_len)
                raise Refusal(400, "prompt_tokens", message, param=param, code=CONTEXT_EXCEEDED)

    def _check_length(self, reason: str, value: list[Any] | dict[Any, Any], param: str, limit: int) -> None:
        if len(value) > limit:
            raise Refusal(400, reason, f"the length of {param} is {len(value)}, at most {limit}", param=param)

    def check_chars(self, num_chars: int, param: str) -> None:
        if num_chars > self.max_prompt_chars:
            comparison = f"{num_chars} characters > {self.max_prompt_chars} maximum (max_prompt_chars)"
            message = too_long_message(comparison, self._max_model_len)
            raise Refusal(400, "prompt_chars", message, param=param, code=CONTEXT_EXCEEDED)

    def check_logprobs(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Raise Refusal for too many log-probabilities: all of them are in memory until the last answer is sent."""
        longest, total = self._max_model_len, 0
        if params.logprobs is not None:
            total += (1 + params.logprobs) * len(prompts) * min(longest, params.max_tokens or longest)
        if params.prompt_logprobs is not None:
            total += (1 + params.prompt_logprobs) * sum(min(longest, len(prompt)) for prompt in prompts)
        total *= params.n  # each answer repeats the log-probabilities of its prompt
        if total > self._max_logprobs:
            message = (
                f"the request asks for up to {total} log-probabilities, at most {self._max_logprobs}; lower "
                "logprobs, prompt_logprobs, max_tokens or n, or send fewer prompts"
            )
            raise Refusal(400, "logprobs", message, param="logprobs" if params.logprobs else "prompt_logprobs")


# -- checks of answers -------------------------------------------------------------------------------------------------


class AnswerChecks:
    """Recomputes a share of the finished answers while the server is idle, and counts differences.

    A check is a request whose prompt is the answer's prompt followed by the answer. The log-probabilities of the check
    give the most likely token at each position of the answer. The check recomputes everything as a prefill: without
    cached keys, draft tokens, CPU attention or the graphs of decode steps. Only greedy answers without constraints and
    penalties are checked, because only greedy answers take the most likely token. A token that is not the most likely
    one is a difference, unless both are equally likely up to rounding (`TIES`).

    Used on the event loop only. If a request arrives during a check, the check is abandoned and repeated later.
    """

    def __init__(self, engine: AsyncLLM, metrics: Metrics, share: float, is_idle: Callable[[], bool]) -> None:
        """is_idle: a function that returns True if the server has no open answers."""
        self._engine, self._metrics, self._share, self._is_idle = engine, metrics, share, is_idle
        self._tie = TIES[dtype_name(engine.llm.config, engine.llm.model_config)]
        self._queue: deque[RequestOutput] = deque()
        self._task: asyncio.Task[None] | None = None

    def answer_ended(self, output: RequestOutput, params: SamplingParams) -> None:
        """Decide at random whether to check an answer."""
        is_whole = output["finish_reason"] in ("stop", "length") and output["token_ids"]
        if is_whole and len(self._queue) < MAX_CHECKS and _is_plain(params) and random.random() < self._share:
            self._queue.append(output)
            if self._task is None or self._task.done():
                self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        with suppress(EngineError):  # the requests' own streams report the error
            while self._queue:
                await asyncio.sleep(IDLE_S)
                if self._is_idle() and (is_same := await self._check(self._queue[0])) is not None:
                    self._queue.popleft()
                    self._metrics.answer_checked(is_same)

    async def _check(self, output: RequestOutput) -> bool | None:
        """Return True if the answer has the most likely tokens, or None if a request interrupted the check."""
        token_ids, num_prompt = [*output["prompt_token_ids"], *output["token_ids"]], len(output["prompt_token_ids"])
        # The last token is not part of the prompt, because the longest answers leave no room for another
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=20, prompt_logprobs=1)
        prompt = {"prompt_token_ids": token_ids[:-1], "cache_salt": _CHECK_SALT}
        stream = await self._engine.submit(prompt, params)
        scoring = asyncio.ensure_future(stream.outputs())
        try:
            while not scoring.done():
                await asyncio.wait((scoring,), timeout=IDLE_S)
                if not (scoring.done() or self._is_idle()):
                    return None
            (scored,) = scoring.result()
        finally:
            scoring.cancel()
            stream.close()
        entries = [*scored["prompt_logprobs"][num_prompt:], *scored["logprobs"]]
        return agrees(output["token_ids"], entries, self._tie)


def agrees(token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], tie: float) -> bool:
    """Return True if each token's log-probability is within `tie` of the most likely token's at the same position."""
    for token_id, entry in zip(token_ids, entries, strict=True):
        assert entry is not None, "only the first token of a prompt has no log-probability"
        best = max(known.logprob for known in entry.values())
        if token_id not in entry or best - entry[token_id].logprob > tie:
            return False
    return True


def _is_plain(params: SamplingParams) -> bool:
    """Return True for parameters with which an answer takes the most likely tokens."""
    has_penalty = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    has_edits = params.structured_outputs or params.logit_bias or params.bad_words or params.min_tokens
    return params.temperature == 0 and not has_penalty and not has_edits
