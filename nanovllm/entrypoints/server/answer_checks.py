"""AnswerChecks: recomputes a share of the finished answers while the server is idle, and counts differences.

The check of an answer is a request of its own, whose prompt is the prompt and the answer. Its log-probabilities say
which token the model finds most likely at each place of the answer. All of that is computed anew, as a prompt: without
cached keys, guesses, the CPU's part of decode steps or their graphs. Only greedy answers without constraints and
penalties can be checked, because only they take the most likely token.

A token that is not the most likely one differs, unless it is as likely up to rounding: `TIES` says what that means.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from nanovllm.async_llm import AsyncLLM
from nanovllm.entrypoints.server.metrics import Metrics
from nanovllm.errors import EngineError
from nanovllm.plan.kv_spec import dtype_name
from nanovllm.plan.outputs import RequestOutput, TokenLogprobs
from nanovllm.sampling_params import SamplingParams

TIES = {"float32": 0.002, "bfloat16": 0.25, "float16": 0.032}  # two units in the last place of a logit from 16 to 32
MAX_QUEUE = 16  # answers that wait to be checked; while there are more, no others are drawn
IDLE_S = 0.2  # time without open answers before a check begins
CACHE_SALT = "a check of an answer"


class AnswerChecks:
    """Used on the event loop only. A check that meets a request is given up, and tried again later."""

    def __init__(self, engine: AsyncLLM, metrics: Metrics, share: float, is_idle: Callable[[], bool]) -> None:
        """`is_idle`: returns True if the server has no open answers."""
        self._engine, self._metrics, self._share, self._is_idle = engine, metrics, share, is_idle
        self._tie = TIES[dtype_name(engine.llm.config, engine.llm.model_config)]
        self._queue: deque[RequestOutput] = deque()
        self._task: asyncio.Task[None] | None = None

    def answer_ended(self, output: RequestOutput, params: SamplingParams) -> None:
        """Draw whether to check an answer."""
        is_whole = output["finish_reason"] in ("stop", "length") and output["token_ids"]
        if is_whole and len(self._queue) < MAX_QUEUE and _is_plain(params) and random.random() < self._share:
            self._queue.append(output)
            if self._task is None or self._task.done():
                self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        with suppress(EngineError):  # others report it
            while self._queue:
                await asyncio.sleep(IDLE_S)
                if self._is_idle() and (is_same := await self._check(self._queue[0])) is not None:
                    self._queue.popleft()
                    self._metrics.answer_checked(is_same)

    async def _check(self, output: RequestOutput) -> bool | None:
        """Return True if the answer has the most likely tokens, None if a request has come before that is known."""
        token_ids, num_prompt = [*output["prompt_token_ids"], *output["token_ids"]], len(output["prompt_token_ids"])
        # The last token is not part of the prompt, because the longest answers leave no room for another
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=20, prompt_logprobs=1)
        prompt = {"prompt_token_ids": token_ids[:-1], "cache_salt": CACHE_SALT}
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
    """Return True if each token is the most likely one at its place, or less likely by `tie` at most."""
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
