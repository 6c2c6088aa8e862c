"""LLM: the class that users call. Combines an engine, which works on token ids, with tokenizing and detokenizing."""

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.capacity.plan import CapacityPlan
from nanovllm.checkpoint.settings import read_sampling_defaults
from nanovllm.compat import CALL, no_attribute, translated
from nanovllm.config import Config, EngineOptions
from nanovllm.device.devices import num_gpus, resolve_device
from nanovllm.engine.setup import Internals, find_machine, prepare
from nanovllm.engine.startup import start_engine
from nanovllm.errors import EngineError, RequestError
from nanovllm.outputs import RequestOutput
from nanovllm.plan.outputs import Outbox, StepOutput, with_answers, with_logprob_lists
from nanovllm.plan.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule.scheduler import Scheduler
from nanovllm.text.frontend import Message, Prompt, TextFrontend
from nanovllm.utils import progress_bar
from nanovllm.utils.options import documented

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Entry points import from this module alone: the LLM, the search for devices, and the type of LLM's `internals`
__all__ = ["LLM", "Internals", "find_machine", "num_gpus", "resolve_device"]


@documented(Config)
class LLM:
    """An engine and its model.

        with LLM("path/to/model", enable_cpu_offload=True, num_gpu_blocks=8) as llm:
            outputs = llm.generate(["Hello"], SamplingParams(temperature=0))

    The options are the fields of nanovllm.config.Config (docs/options.md). Invalid options raise ConfigError before
    anything is allocated.

    Several threads may use one LLM. Their requests share steps, and each call returns only its own outputs. On a GPU,
    steps are fastest in the thread that made the LLM: in any other thread, cuDNN builds a plan (30 ms) for each size of
    long chunks on first use. After an error inside a step the engine runs nothing more, and later calls raise an
    EngineError that names the cause.
    """

    def __init__(self, model: str | Path, **options: "Unpack[EngineOptions]") -> None:
        """Start an engine. model: a directory, a GGUF file, a hub name, a preset or "demo" for the built-in model.

        options: the fields of Config, or vLLM's names for them (nanovllm/compat.py). Raises ConfigError for invalid
        options and when the engine does not fit in memory, and CheckpointError when the model cannot be read. After any
        exception, all workers have been stopped and all memory has been released.
        """
        given: dict[str, Any] = {**options}
        setup = prepare(model, given, given.pop("internals", Internals()))  # tests and the command line give internals
        self.config, self.model_config, self.max_model_len = setup.config, setup.model_config, setup.max_model_len
        self.sampling_defaults: dict[str, Any] = {}  # recommended by the model
        if self.config.generation_config == "auto":
            self.sampling_defaults = read_sampling_defaults(setup.directory)
        self.text = TextFrontend(self.model_config, None if self.config.skip_tokenizer_init else setup.directory)
        self.tokenizer = self.text.tokenizer
        self._outbox = Outbox()  # outputs of requests from `add_request`; `step` returns them
        self.engine = start_engine(setup, self.text.end_token_ids)  # last, because a running engine must be closed

    @classmethod
    def from_engine_args(cls, engine_args: Mapping[str, Any]) -> "LLM":
        """Make an engine with these arguments, such as EngineArgs."""
        return cls(**engine_args)

    if not TYPE_CHECKING:  # a type checker would let every attribute pass

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name)

    def close(self) -> None:
        """Stop the workers and release all memory. The LLM cannot be used afterwards. Closing twice is allowed."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- whole answers -------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt] | None = None,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *more: Any,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one prompt or several, and return the outputs in the order of the prompts.

        A prompt is a string, a sequence of token ids (which may be a numpy array), or a dict as in vLLM:
        {"prompt": text} or {"prompt_token_ids": ids}. One call may mix these kinds. A dict may also have a
        "cache_salt", a string: prompts share KV only if their salts are equal.

        sampling_params: one for all prompts, or a list with one per prompt. None means SamplingParams(), even if the
        model recommends other values in its generation_config.json (see get_default_sampling_params). With n > 1, each
        output is the output of the prompt's first answer, and its "outputs" has the outputs of all n answers.

        Raises RequestError, and queues no prompt, if any of the prompts could never run. Ctrl-C aborts the requests of
        this call and leaves the engine usable, unless a second Ctrl-C interrupts the engine in the middle of a step.

        others: arguments of vLLM that change nothing (nanovllm/compat.py). more: none; an error explains vLLM's former
        arguments.
        """
        if isinstance(use_tqdm, list | tuple):
            others["prompt_token_ids"] = use_tqdm  # which had this place in earlier versions of vLLM
        translated(others, (), CALL, RequestError, "generate")
        if more:
            raise RequestError("generate takes prompts, sampling_params and use_tqdm in this order; name the others")
        if prompts is None:  # optional only so that the lines above can explain vLLM's former prompt_token_ids
            raise RequestError("generate needs prompts: a prompt (a string, a list of token ids or a dict) or several")
        sequences = self.make_sequences(prompts, sampling_params)
        outbox = Outbox()
        try:
            request_ids = [[self._queue(seq, outbox) for seq in of_prompt] for of_prompt in sequences]
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
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several. A conversation is a list of {"role": ..., "content": ...}. Content is a
        string, or parts of the form {"type": "text", "text": ...}.

        sampling_params: as in `generate`, except that None means the values that the model recommends
        (get_default_sampling_params), and an answer as long as the context allows unless the model recommends a
        max_tokens.

        The model's chat template, or `chat_template`, makes the prompt. tools: functions for the template, as in
        OpenAI's API. add_generation_prompt: end the prompt with the beginning of an answer.
        continue_final_message: leave the last message open, for the answer to continue it; needs
        add_generation_prompt=False. chat_template_kwargs: variables of the template, such as enable_thinking. others:
        as in `generate`.

        Raises RequestError as `generate` does, and for a model that cannot chat.
        """
        translated(others, (), CALL, RequestError, "chat")
        if sampling_params is None:
            sampling_params = SamplingParams(**{"max_tokens": None} | self.sampling_defaults)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message=True leaves no place for a new answer; add add_generation_prompt=False"
            )
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template": chat_template,
            "tools": tools,
        }
        for name in options.keys() & (chat_template_kwargs or {}):
            raise RequestError(f"chat_template_kwargs has {name}, which is an argument of chat; give it there")
        prompts = self.text.encode_chat(messages, template_options=options | (chat_template_kwargs or {}))
        return self.generate(prompts, sampling_params, use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the values that the model's generation_config.json recommends, and defaults for all other values.

        With generation_config="none", every value is SamplingParams' default. A max_tokens that the file recommends is
        lowered, for each prompt, to the room that the prompt leaves in the context.
        """
        return SamplingParams(**self.sampling_defaults)

    def chat_token_ids(self, messages: list[Message] | list[list[Message]]) -> list[list[int]]:
        """Return the prompts that `chat` answers: a list of token ids for each conversation."""
        return [list(prompt["prompt_token_ids"]) for prompt in self.text.encode_chat(messages)]

    def get_tokenizer(self) -> Any:
        """Return the tokenizer, of transformers' kind. Raises RequestError for a model without a tokenizer."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; give token ids")
        return self.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Let later requests share no KV with requests made until now. Returns True.

        The memory of their KV is reused when it is needed. Requests that run or wait are not affected.
        """
        self.text.reset_prefix_cache()
        return True

    def check_chat_template(self) -> None:
        """Raise RequestError for a model that cannot chat."""
        self.text.check_chat_template()

    def make_sequences(
        self, prompts: Prompt | Iterable[Prompt], sampling_params: SamplingParams | list[SamplingParams] | None
    ) -> list[list[Sequence]]:
        """Make the sequences of all answers to each prompt, without queueing them. Arguments: as in `generate`.

        Raises RequestError if any of the prompts could never run.
        """
        requests = self.text.make_requests(prompts, sampling_params)
        return [self.engine.make_sequences(request) for request in requests]

    def _make_sequence(self, prompt: Prompt, params: SamplingParams) -> Sequence:
        """Make the sequence of a request for one answer, without queueing it. Raises RequestError."""
        request = self.text.make_request(prompt, params)
        if params.n != 1:
            raise RequestError(f"n={params.n} applies to generate and chat; here, add a request for each answer")
        (seq,) = self.engine.make_sequences(request)
        return seq

    def _queue(self, seq: Sequence, outbox: Outbox) -> int:
        """Queue a sequence and return its request id. Its text and output are delivered to `outbox`."""
        return self.engine.add_sequence(seq, self.text.receiver(outbox, seq.params, seq.token_ids))

    def _collect(self, outbox: Outbox, num_requests: int, use_tqdm: bool) -> dict[int, RequestOutput]:
        """Run until all requests have ended, and return their outputs by request id.

        Meanwhile a progress bar shows the number of ended requests, and the rates in tokens per second.
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
        """Return the progress bar's figures on offload since the start (see `stats`), or {} before the first miss."""
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
        """Return the progress bar's figures on draft tokens, or {} before the first draft token."""
        if self.config.speculation_method == "off":
            return {}
        stats = self.stats()
        if stats["guess_acceptance"] is None:
            return {}
        return {"guesses": f"{stats['guess_acceptance']:.0%} right, {stats['tokens_per_pass']:.1f}tok/pass"}

    # -- streaming text ------------------------------------------------------------------------------------------

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Yield the answer's text piece by piece, as it is generated.

        The call checks the request, and the first step of the iterator queues the request. Leaving the loop early
        aborts the request. Raises RequestError for a request that can never run or has no text, and EngineError if the
        request fails.
        """
        params = sampling_params or SamplingParams()
        self.text.check_stream(params)
        return self._stream(self._make_sequence(prompt, params))

    def _stream(self, seq: Sequence) -> Iterator[str]:
        outbox = Outbox()
        try:
            request_id = self._queue(seq, outbox)
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

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams) -> int:
        """Queue a request and return its id. Raises RequestError, and queues nothing, if the request can never run."""
        return self._queue(self._make_sequence(prompt, sampling_params), self._outbox)

    def abort(self, request_id: int) -> bool:
        """End a request, now or when the step in progress ends. Returns False if the request has ended or is unknown.

        The request still gets an output, with the tokens generated until then and finish_reason "abort".
        """
        return self.engine.abort(request_id)

    def step(self) -> StepOutput:
        """Run the next step, and return all new results of the requests from `add_request` since the last call.

        On a GPU, `step` returns the tokens of the previous step, because the engine works one step ahead. Raises
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
        """Return counters since the start, and present rates. Names end in their units. Raises EngineError if the
        engine has failed or is closed. A rate or a share is None before its first measurement.

        num_prefill_tokens           prompt tokens that were computed
        num_decode_tokens            tokens of answers, without the first token of each answer

        With offload, for rank 0:
        link_byte_per_s              the rate of the link, measured at start-up
        load_byte_per_s              bytes over the link per second of decode steps that missed blocks (LinkMeter)
        link_share                   load_byte_per_s / link_byte_per_s
        cpu_attention                the CPU's kernel and its number of threads, or None if CPU attention is disabled
        cpu_attention_byte_per_s     the rate of the CPU while the link is busy, from start-up and decode steps
        cpu_load_byte_per_s          bytes that the CPU attended to per second of decode steps that missed blocks

        With experts in CPU memory:
        num_cpu_expert_layers        layers whose experts are in CPU memory
        cpu_expert_bytes             size of these experts, on all ranks
        max_cpu_expert_rows          tokens of a step up to which the CPU computes experts, chosen at start-up
        num_cpu_computed_layers      layers whose experts the CPU of rank 0 has computed, in all steps
        expert_link_share            share of a step's experts that rank 0's GPU reads by itself, chosen at start-up
        num_streamed_expert_layers   layers whose experts were streamed to rank 0's GPU, in all steps

        With speculation:
        num_guesses                  draft tokens
        num_accepted_guesses         accepted draft tokens; all draft tokens after a wrong one count as rejected
        guess_acceptance             num_accepted_guesses / num_guesses
        tokens_per_pass              mean number of tokens from a verification step
        drafters                     by drafter: num_guesses, num_accepted_guesses, and accepted_by_position: the share
                                     of steps that accepted the first draft token, the second draft token and so on
        num_shadow_pages             KV blocks that the shadow has room for; absent without a shadow
        num_used_shadow_pages        KV blocks in the shadow; absent without a shadow

        With recurrent layers or windows:
        num_state_slots              states that the GPU has room for
        num_snapshots                states that CPU memory has room for
        num_used_snapshots           states in CPU memory, for prompts with a common prefix and preempted sequences
        num_state_loads              sequences that began with a state from CPU memory
        num_state_saves              states that were saved to CPU memory

        With KV on disk. An extent is K and V of 256 tokens, or a state:
        num_disk_hit_tokens          tokens of prompts whose K and V were read from disk
        num_disk_hit_states          states that were read from disk
        num_waiting_for_disk         requests that wait for extents
        num_cancelled_disk_loads     loads that were cancelled because the disk hung
        num_disk_extents             extents of this model that rank 0 knows
        num_disk_bytes               bytes of the extents of all models that rank 0 knows
        num_disk_stored_bytes        bytes that rank 0 has written
        num_disk_loaded_bytes        bytes that rank 0 has read
        disk_write_byte_per_s        mean rate of rank 0's writing
        disk_read_byte_per_s         mean rate of rank 0's reading
        num_disk_misses              files that were damaged or had vanished
        num_disk_evictions           files that rank 0 has removed
        num_disk_failures            extents that a bug kept from being stored or loaded; the log has the first bug
        num_extents_to_store         extents that wait to be written
        num_dropped_extents          extents that were dropped instead of written
        disk_buffer_bytes            CPU memory of the buffers for reading and, with the KV cache on a GPU, for writing
        """
        return self.engine.stats()

    def block_states(self) -> bytes:
        """Return the BlockState of every KV block, one byte per block: where the block is, and what the last step did
        with the block.

        With offload, the blocks are in the order of CPU memory; without offload, in the order of GPU memory. Any thread
        may call this method at any time. The call does not wait: while a step is being planned, the result may show
        some blocks before and some after planning. Takes about 0.1 ms for 1,000 blocks. Raises EngineError if the
        engine has failed or is closed.
        """
        return self.engine.block_states()

    @property
    def device(self) -> Any:
        """The torch.device of rank 0."""
        return self.runner.device

    @property
    def plan(self) -> CapacityPlan:
        """The engine's memory use and the bounds on its speed, updated with start-up's measurements."""
        return self.engine.setup.plan

    @property
    def max_request_tokens(self) -> int:
        """The most tokens, prompt and answer together, that a request can have when it runs alone."""
        return self.engine.max_request_tokens

    @property
    def scheduler(self) -> Scheduler:
        """The engine's scheduler, for tests and measurements."""
        return self.engine.scheduler

    @property
    def runner(self) -> Any:
        """Rank 0's ModelRunner, for tests and measurements. Exists only if rank 0 runs in this process."""
        return self.engine.executor.runner
