"""LLM: what users call. It combines an engine, which works on token ids, with the text on both sides of it."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nanovllm.capacity.plan import CapacityPlan
from nanovllm.checkpoint.settings import read_sampling_defaults
from nanovllm.engine.setup import Internals, prepare
from nanovllm.engine.startup import start_engine
from nanovllm.errors import EngineError, RequestError
from nanovllm.plan.outputs import Outbox, RequestOutput, StepOutput, with_answers, with_logprob_lists
from nanovllm.plan.sequence import Sequence, TokenIds
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule.scheduler import Scheduler
from nanovllm.text.frontend import Message, TextFrontend
from nanovllm.text.request_check import Prompt, cache_salt, prompt_list
from nanovllm.utils.progress import progress_bar


class LLM:
    """An engine and its model.

        with LLM("path/to/model", enable_cpu_offload=True, num_gpu_blocks=8) as llm:
            outputs = llm.generate(["Hello"], SamplingParams(temperature=0))

    The options are the fields of nanovllm.config.Config. Invalid options raise ConfigError before anything is
    allocated.

    Several threads may use one LLM. Their requests share steps, and each call returns only its own outputs. After an
    error inside a step the engine runs nothing more, and later calls raise an EngineError that names the cause.
    """

    def __init__(self, model: str | Path, *, internals: Internals = Internals(), **options: Any) -> None:
        """`model` is a directory, a hub name, a preset or "demo" for the built-in model. `options` are the fields of
        Config.

        Raises ConfigError for invalid options and when the engine does not fit in memory, and CheckpointError when the
        model cannot be read. If this raises, all workers have been stopped and all memory has been released.
        `internals` is for tests.
        """
        setup = prepare(model, options, internals)
        self.config, self.model_config, self.max_model_len = setup.config, setup.model_config, setup.max_model_len
        self.sampling_defaults: dict[str, Any] = {}  # recommended by the model, not chosen by the user
        if self.config.generation_config == "auto":
            self.sampling_defaults = read_sampling_defaults(setup.directory)
        self.text = TextFrontend(self.model_config, None if self.config.skip_tokenizer_init else setup.directory)
        self.tokenizer = self.text.tokenizer
        self._outbox = Outbox()  # outputs of requests from `add_request`; `step` returns them
        self.engine = start_engine(setup, self.text.end_token_ids)  # last: after this only `close` stops it

    def close(self) -> None:
        """Stop the workers and release all memory. The engine cannot be used afterwards; closing twice is fine."""
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
        """Answer one prompt or several, and return the outputs in the order of the prompts.

        A prompt is a string, a sequence of token ids (which may be a numpy array), or a dict as in vLLM:
        {"prompt": text} or {"prompt_token_ids": ids}. One call may mix these kinds. A dict may also have a
        "cache_salt", a string: prompts share KV only if their salts are equal.

        sampling_params: one for all prompts, or a list with one per prompt. None means SamplingParams(), even if the
        model recommends other values in its generation_config.json (see get_default_sampling_params). With n > 1, an
        output is that of the prompt's first answer, and its "outputs" are those of all n.

        Raises RequestError if any of the prompts could never run; no prompt has been queued then. Ctrl-C aborts these
        requests and leaves the engine usable, unless a second Ctrl-C interrupts it in the middle of a step.
        """
        listed = prompt_list(prompts)
        sequences = self.make_sequences(listed, params_list(sampling_params, len(listed)))
        outbox = Outbox()
        try:
            request_ids = [
                [
                    self.engine.add_sequence(seq, self.text.receiver(outbox, seq.params, seq.token_ids))
                    for seq in of_prompt
                ]
                for of_prompt in sequences
            ]
            outputs = self._collect(outbox, sum(map(len, request_ids)), use_tqdm)
        except BaseException:
            self.engine.abort_all(outbox)
            raise
        with_logprob_lists(outputs.values())
        return [with_answers([outputs[request_id] for request_id in of_prompt]) for of_prompt in request_ids]

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several. A conversation is a list of {"role": ..., "content": ...}.

        The model's chat template turns it into a prompt. sampling_params: as in `generate`, except that None means
        `get_default_sampling_params()`. Raises RequestError as `generate` does, and for a model that cannot chat.
        """
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        return self.generate(self.chat_token_ids(messages), sampling_params, use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the values that the model's generation_config.json recommends, and defaults for all others.

        With generation_config="none", every value is SamplingParams' default. A max_tokens of the file is shortened to
        what fits in the context after a prompt.
        """
        return SamplingParams(**self.sampling_defaults)

    def chat_token_ids(self, messages: list[Message] | list[list[Message]]) -> list[list[int]]:
        """Return the prompts that `chat` answers: a list of token ids for each conversation."""
        return [token_ids.tolist() for token_ids in self.text.encode_chat(messages)]

    def check_chat_template(self) -> None:
        """Raise RequestError for a model that cannot chat."""
        self.text.check_chat_template()

    def make_sequences(self, prompts: list[Prompt], params: list[SamplingParams]) -> list[list[Sequence]]:
        """Make the sequences of all answers to each prompt, without queueing them.

        Raises RequestError if any of them could never run.
        """
        answers = [each.per_answer() for each in params]
        prompts_ids = [self.check_request(prompt, each[0]) for prompt, each in zip(prompts, answers, strict=True)]
        sequences: list[list[Sequence]] = []
        for prompt, token_ids, each in zip(prompts, prompts_ids, answers, strict=True):
            salt, of_prompt = cache_salt(prompt), list[Sequence]()
            for p in each:
                first = of_prompt[0] if of_prompt else None
                of_prompt.append(self.engine.make_sequence(token_ids, p, self.text.rules(p), salt, first))
            sequences.append(of_prompt)
        return sequences

    def _collect(self, outbox: Outbox, num_requests: int, use_tqdm: bool) -> dict[int, RequestOutput]:
        """Run until all requests have ended, and return their outputs by request id.

        Meanwhile a progress bar shows how many have ended, and the rates in tokens per second.
        """
        outputs: dict[int, RequestOutput] = {}
        rates = {"Prefill": 0.0, "Decode": 0.0}
        with progress_bar(total=num_requests, desc="Generating", is_wanted=use_tqdm) as bar:
            while len(outputs) < num_requests:
                start_s = time.perf_counter()
                output = self.engine.next_output(outbox)
                seconds = time.perf_counter() - start_s
                kind = "Prefill" if output.num_prefill_tokens else "Decode"
                if use_tqdm and (num_tokens := output.num_prefill_tokens or output.num_decode_tokens):
                    rates[kind] = num_tokens / seconds
                    shown = {name: f"{rate:.0f}tok/s" for name, rate in rates.items()}
                    bar.set_postfix(shown | self._link_figures() | self._guess_figures(), refresh=False)
                outputs |= output.finished
                bar.update(len(output.finished))
        return outputs

    def _link_figures(self) -> dict[str, str]:
        """Return the progress bar's figures since the engine's start (see `stats`); none until blocks are missed."""
        if not self.config.enable_cpu_offload:
            return {}
        stats = self.stats()
        if not stats["num_missed_blocks"]:
            return {}
        figures = {"hit/missed": f"{stats['num_hit_blocks']}/{stats['num_missed_blocks']}"}
        if stats["load_byte_per_s"] is not None:
            share = "" if stats["link_share"] is None else f" ({stats['link_share']:.0%})"
            rates = {"link": f"{stats['load_byte_per_s'] / 1e9:.1f}GB/s{share}"}
            if stats["cpu_load_byte_per_s"]:
                rates["cpu"] = f"{stats['cpu_load_byte_per_s'] / 1e9:.1f}GB/s"
            figures = rates | figures
        return figures

    def _guess_figures(self) -> dict[str, str]:
        """Return the progress bar's figures for guesses; none until there are any."""
        if self.config.speculation_method == "off":
            return {}
        stats = self.stats()
        if stats["guess_acceptance"] is None:
            return {}
        return {"guesses": f"{stats['guess_acceptance']:.0%} right, {stats['tokens_per_pass']:.1f}tok/pass"}

    # -- streaming text ------------------------------------------------------------------------------------------

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Yield the answer's text piece by piece, as it is generated.

        The request is checked at once, and queued when the iterator is first advanced. Leaving the loop early aborts
        it. Raises RequestError for a request that can never run or has no text, and EngineError if the request fails.
        """
        params = sampling_params or SamplingParams()
        self.text.check_stream(params)
        return self._stream(self.check_request(prompt, params), params, cache_salt(prompt))

    def _stream(self, token_ids: TokenIds, params: SamplingParams, salt: str | None) -> Iterator[str]:
        outbox = Outbox()
        try:
            request_id = self._queue(token_ids, params, outbox, salt)
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

    # -- single requests and steps -------------------------------------------------------------------------------

    def check_request(self, prompt: Prompt, params: SamplingParams) -> TokenIds:
        """Return the prompt's token ids (int64). Raises RequestError for a request that can never run."""
        token_ids = self.text.encode_prompt(prompt)
        self.engine.admission.check(token_ids, params)
        self.text.check_params(params)
        return token_ids

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams) -> int:
        """Queue a request and return its id. Raises RequestError, and changes nothing, if it can never run."""
        token_ids = self.check_request(prompt, sampling_params)
        return self._queue(token_ids, sampling_params, self._outbox, cache_salt(prompt))

    def _queue(self, token_ids: TokenIds, params: SamplingParams, outbox: Outbox, salt: str | None) -> int:
        """Queue a request that `check_request` has accepted. Its text and its output go to `outbox`."""
        receiver, rules = self.text.receiver(outbox, params, token_ids), self.text.rules(params)
        return self.engine.add_request(token_ids, params, receiver, rules, salt)

    def abort(self, request_id: int) -> bool:
        """End a request, now or as soon as the step in progress ends. Returns False if it has ended or is unknown.

        The request still gets an output, which holds what was generated and has finish_reason "abort".
        """
        return self.engine.abort(request_id)

    def step(self) -> StepOutput:
        """Run the next step, and return what is new since the last call for the requests from `add_request`.

        On a GPU, the tokens returned are those of the step before, because the engine works one step ahead. Raises
        EngineError if a worker has died, an earlier step has failed, or the engine is closed.
        """
        output = self.engine.step(self._outbox)
        with_logprob_lists(output.finished.values())
        return output

    def is_finished(self) -> bool:
        """Return True if every request has ended and `step` has returned all outputs of `add_request`'s requests."""
        return not self.engine.has_requests and not self._outbox

    # -- a look inside -------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return counters since the start, such as numbers of steps and blocks. Keys name their units.

        num_prefill_tokens and num_decode_tokens count as StepOutput does: tokens of prompts that were computed, and
        tokens that answers got after their first.

        With offload there are more figures, for rank 0:
        - link_byte_per_s: the link's rate, measured at start-up; None on a CPU.
        - load_byte_per_s: bytes that cross the link in decode steps that miss blocks, divided by their duration (see
          LinkMeter). None until two such steps have run in a row.
        - link_share: load_byte_per_s / link_byte_per_s; None if either is.
        - cpu_attention: the CPU's kernel and its number of threads; None if the CPU takes no part.
        - cpu_attention_byte_per_s: the rate at which the CPU attends while the link is busy. Measured at start-up, it
          follows what decode steps take. None on a CPU.
        - cpu_load_byte_per_s: like load_byte_per_s, for the bytes that the CPU attends to.

        With speculation:
        - num_guesses, num_accepted_guesses: tokens that were guessed, and those of them that were right. Guesses after
          the first wrong one count as wrong.
        - guess_acceptance: num_accepted_guesses / num_guesses; None without guesses.
        - tokens_per_pass: mean number of tokens that a step with guesses has yielded; None without guesses.
        - drafters: by the name of each drafter that has guessed, its num_guesses and num_accepted_guesses, and in
          accepted_by_position the share of passes that kept the first guess, the second and so on.
        - num_shadow_pages, num_used_shadow_pages: KV blocks that the shadow has room for, and those that it holds;
          without a shadow they are left out.

        With recurrent layers:
        - num_state_slots: states that the GPU has room for, one for each running sequence and a few more.
        - num_snapshots, num_used_snapshots: states that CPU memory has room for, and those that it keeps for prompts
          that begin in the same way and for preempted sequences.
        - num_state_loads, num_state_saves: sequences that began with such a state, and states that were kept.

        With KV on disk, for rank 0 where it says so; an extent is K and V of 256 tokens, or a state:
        - num_disk_hit_tokens: tokens of prompts whose K and V were read from disk. num_disk_hit_states: states that
          were.
        - num_waiting_for_disk: requests that wait for a load. num_cancelled_disk_loads: loads that were cancelled
          because the disk hung.
        - num_disk_extents, num_disk_bytes: extents of this model, and bytes of all models, as far as rank 0 knows.
        - num_disk_stored_bytes, num_disk_loaded_bytes, disk_write_byte_per_s, disk_read_byte_per_s: bytes and mean
          rates of rank 0. A rate is None before the first store or load.
        - num_disk_misses: files that were damaged or had vanished. num_disk_evictions: files that rank 0 has removed.
        - num_disk_failures: extents that were not stored or loaded because of a bug. The first is logged with its
          traceback.
        - num_extents_to_store, num_dropped_extents: extents that wait to be written, and those that were left out.
        - disk_buffer_bytes: CPU memory of the buffers through which extents are read, and, with the KV cache on a GPU,
          written.

        Raises EngineError if the engine has failed or is closed.
        """
        return self.engine.stats()

    def block_states(self) -> bytes:
        """Return where every KV block is and what the last step did with it: one byte (BlockState) per block.

        With offload these are the blocks of CPU memory in their order there; without, those of the GPU. Any thread may
        call this at any time. It does not wait, so while a step is being planned, some blocks are shown before it and
        some after. It takes about 0.1 ms for 1,000 blocks. Raises EngineError if the engine has failed or is closed.
        """
        return self.engine.block_states()

    @property
    def device(self) -> Any:
        """The torch.device of rank 0."""
        return self.runner.device

    @property
    def plan(self) -> CapacityPlan:
        """The memory this engine takes and the bounds on its speed, updated with what start-up measured."""
        return self.engine.setup.plan

    @property
    def max_request_tokens(self) -> int:
        """The most tokens, prompt and answer together, that a request can have when it runs alone."""
        return self.engine.admission.max_request_tokens

    @property
    def scheduler(self) -> Scheduler:
        """The engine's scheduler, for tests and measurements."""
        return self.engine.scheduler

    @property
    def runner(self) -> Any:
        """Rank 0's ModelRunner, for tests and measurements. Exists only if rank 0 runs in this process."""
        return self.engine.executor.runner


def params_list(params: Any, num_prompts: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if not isinstance(params, list | tuple):
        params = [params] * num_prompts
    if len(params) != num_prompts:
        raise RequestError(f"{len(params)} sampling_params for {num_prompts} prompts; give one, or one per prompt")
    for each in params:
        if not isinstance(each, SamplingParams):
            raise RequestError(f"sampling_params has type {type(each).__name__}, expected SamplingParams")
    return list(params)
