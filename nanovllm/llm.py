"""LLM: an engine of token ids, the text around it, and the calls a user makes."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from nanovllm.capacity.plan import CapacityPlan
from nanovllm.checkpoint.generation_config import read_sampling_defaults
from nanovllm.core.outputs import Outbox, RequestOutput, StepOutput
from nanovllm.core.sequence import TokenIds
from nanovllm.engine.internals import Internals
from nanovllm.engine.setup import prepare
from nanovllm.engine.startup import start_engine
from nanovllm.errors import EngineError, RequestError
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.scheduler import Scheduler
from nanovllm.text.frontend import Message, TextFrontend
from nanovllm.text.request_check import Prompt, prompt_list


class LLM:
    """An engine and its model.

        with LLM("path/to/model", enable_cpu_offload=True, num_gpu_blocks=8) as llm:
            outputs = llm.generate(["Hello"], SamplingParams(temperature=0))

    The options are the fields of nanovllm.config.Config; bad ones raise ConfigError before anything is allocated.

    Several threads may use one LLM: their requests run together, and each call returns its own. After an error inside
    a step every call raises EngineError with the cause.
    """

    def __init__(self, model: str | Path, *, internals: Internals = Internals(), **options: Any) -> None:
        """`model`: directory, hub name or preset; `options`: the fields of Config. Raises ConfigError for bad ones, and
        for an engine that does not fit in memory; whatever is raised, nothing is left behind. `internals` is for tests.
        """
        setup = prepare(model, options, internals)
        self.config, self.model_config, self.max_model_len = setup.config, setup.model_config, setup.max_model_len
        self.sampling_defaults: dict[str, Any] = {}  # what the model recommends, and not what the user chose
        if self.config.generation_config == "auto":
            self.sampling_defaults = read_sampling_defaults(setup.directory)
        self.text = TextFrontend(self.model_config, setup.directory)
        self.tokenizer = self.text.tokenizer
        self._outbox = Outbox()  # for requests from `add_request`, whose outputs `step` returns
        self.engine = start_engine(setup, self.text.end_token_ids)  # last, since only `close` stops it from here on

    def close(self) -> None:
        """Stop the workers and give all memory back. The engine cannot be used afterwards; closing twice is fine."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- whole answers -------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one prompt or several; the outputs come in the order of the prompts.

        A prompt is a string, a sequence of token ids (a numpy array, too), or a dict as in vLLM: {"prompt": text} or
        {"prompt_token_ids": ids}; one call may mix them. sampling_params: one for all, or one per prompt; None:
        SamplingParams(), whatever the model's generation_config.json says (see get_default_sampling_params). Raises
        RequestError, before any prompt is queued, when one of them cannot run. After Ctrl-C these requests are gone and
        the engine can be used again, unless a second Ctrl-C interrupted it in the middle of a step.
        """
        listed = prompt_list(prompts)
        params = _params_list(sampling_params, len(listed))
        prompts_ids = [self.check_request(prompt, p) for prompt, p in zip(listed, params, strict=True)]
        outbox = Outbox()
        try:
            request_ids = [self._queue(ids, p, outbox) for ids, p in zip(prompts_ids, params, strict=True)]
            outputs = self._collect(outbox, len(request_ids), use_tqdm)
        except BaseException:
            self.engine.abort_all(outbox)
            raise
        return [outputs[request_id] for request_id in request_ids]

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role", "content"}, with the model's chat template.

        sampling_params: as in `generate`, but None means `get_default_sampling_params()`.
        """
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        return self.generate(self.chat_token_ids(messages), sampling_params, use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends, and SamplingParams' defaults for what it does not name.

        With generation_config="none" the defaults alone.
        """
        return SamplingParams(**self.sampling_defaults)

    def chat_token_ids(self, messages: list[Message] | list[list[Message]]) -> list[list[int]]:
        """The prompts that `chat` answers: a list of token ids for each conversation."""
        return [token_ids.tolist() for token_ids in self.text.encode_chat(messages)]

    def check_chat_template(self) -> None:
        """Raise RequestError for a model that cannot chat."""
        self.text.check_chat_template()

    def _collect(self, outbox: Outbox, num_requests: int, use_tqdm: bool) -> dict[int, RequestOutput]:
        """Outputs by request id, once all have come; meanwhile a bar shows how many have, and at what rate."""
        outputs: dict[int, RequestOutput] = {}
        rates = {"Prefill": 0.0, "Decode": 0.0}
        with tqdm(total=num_requests, desc="Generating", dynamic_ncols=True, disable=not use_tqdm) as bar:
            while len(outputs) < num_requests:
                start_s = time.perf_counter()
                output = self.engine.next_output(outbox)
                seconds = time.perf_counter() - start_s
                kind = "Prefill" if output.num_prefill_tokens else "Decode"
                if use_tqdm and (num_tokens := output.num_prefill_tokens or output.num_decode_tokens):
                    rates[kind] = num_tokens / seconds
                    shown = {name: f"{rate:.0f}tok/s" for name, rate in rates.items()}
                    bar.set_postfix(shown | self._link_figures(), refresh=False)
                outputs |= output.finished
                bar.update(len(output.finished))
        return outputs

    def _link_figures(self) -> dict[str, str]:
        """For the progress bar, once blocks have been streamed: since the engine's start, see `stats`."""
        if not self.config.enable_cpu_offload:
            return {}
        stats = self.stats()
        if not stats["num_missed_blocks"]:
            return {}
        figures = {"hit/missed": f"{stats['num_hit_blocks']}/{stats['num_missed_blocks']}"}
        if stats["load_byte_per_s"] is not None:
            share = "" if stats["link_share"] is None else f" ({stats['link_share']:.0%})"
            figures = {"link": f"{stats['load_byte_per_s'] / 1e9:.1f}GB/s{share}"} | figures
        return figures

    # -- text as it comes ----------------------------------------------------------------------------------------

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The answer's text, piece by piece as it comes. The request is queued when the first piece is asked for;
        leaving the loop early aborts it.
        """
        params = sampling_params or SamplingParams()
        self.text.check_stream(params)
        return self._stream(self.check_request(prompt, params), params)

    def _stream(self, token_ids: TokenIds, params: SamplingParams) -> Iterator[str]:
        outbox = Outbox()
        try:
            request_id = self._queue(token_ids, params, outbox)
            finished = False
            while not finished:
                output = self.engine.next_output(outbox)
                finished = request_id in output.finished
                if text := output.texts.get(request_id):
                    yield text
            if error := output.finished[request_id].get("error"):
                raise EngineError(f"the request failed: {error}")
        finally:
            self.engine.abort_all(outbox)

    # -- requests by hand ----------------------------------------------------------------------------------------

    def check_request(self, prompt: Prompt, params: SamplingParams) -> TokenIds:
        """The prompt's token ids, int64. Raises RequestError for a request that can never run."""
        token_ids = self.text.encode_prompt(prompt)
        self.engine.check_request(token_ids, params)
        self.text.check_params(params)
        return token_ids

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams) -> int:
        """Queue a request and return its id. Raises RequestError, leaving all else untouched, when it can never run."""
        return self._queue(self.check_request(prompt, sampling_params), sampling_params, self._outbox)

    def _queue(self, token_ids: TokenIds, params: SamplingParams, outbox: Outbox) -> int:
        """Queue a request that `check_request` has let through; what it brings goes to `outbox`."""
        return self.engine.add_request(token_ids, params, self.text.receiver(outbox, params))

    def abort(self, request_id: int) -> bool:
        """End a request: at once, or when the running step ends. False when it has ended already or never was.

        Its output, with what it has generated, comes with finish_reason "abort".
        """
        return self.engine.abort(request_id)

    def step(self) -> StepOutput:
        """Run the next step (one ahead of the tokens returned, on a GPU). Returns what has come since the last call
        for requests from `add_request`. Raises EngineError when a worker died or an earlier step failed.
        """
        return self.engine.step(self._outbox)

    def is_finished(self) -> bool:
        """Whether every request has ended, and `step` has returned the outputs that are its to return."""
        return not self.engine.has_requests and not self._outbox

    # -- what goes on inside -------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters since the start: blocks, bytes moved, preemptions; bytes in *_bytes, rates in their unit.

        With offload also, of rank 0: link_byte_per_s, measured at start (None on a CPU); load_byte_per_s, what streamed
        decode steps loaded over their time (None before the second of them; see LinkMeter); link_share, the second of
        the first.
        """
        return self.engine.stats()

    @property
    def device(self) -> Any:
        """The torch.device of rank 0."""
        return self.engine.setup.device

    @property
    def plan(self) -> CapacityPlan:
        """The memory and the bounds of this engine, with what start-up has measured."""
        return self.engine.setup.plan

    @property
    def max_request_tokens(self) -> int:
        """Tokens of prompt and answer that the KV cache has room for, for one request alone."""
        return self.engine.admission.max_request_tokens

    @property
    def scheduler(self) -> Scheduler:
        """For tests and measurements, as is `runner`."""
        return self.engine.scheduler

    @property
    def runner(self) -> Any:
        """Rank 0's ModelRunner, for tests and measurements. Only an executor that has rank 0 in this process has it."""
        executor: Any = self.engine.executor
        return executor.runner


def _params_list(params: Any, num_prompts: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if not isinstance(params, list | tuple):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise RequestError(f"{len(params)} sampling_params for {num_prompts} prompts; give one, or one per prompt")
    return list(params)
