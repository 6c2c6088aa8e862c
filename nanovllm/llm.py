"""LLM: the engine with the calls a user makes."""

import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from tqdm.auto import tqdm

from nanovllm.core.outputs import Outbox, RequestOutput
from nanovllm.core.sequence import TokenIds
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import EngineError, RequestError
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.request_check import Prompt, check_conversations, encode_text, prompt_list, render_chat

Message: TypeAlias = dict[str, Any]


class LLM(LLMEngine):
    """An engine and its model.

        with LLM("path/to/model", enable_cpu_offload=True, num_gpu_blocks=8) as llm:
            outputs = llm.generate(["Hello"], SamplingParams(temperature=0))

    The options are the fields of nanovllm.config.Config; bad ones raise ConfigError before anything is allocated.

    Several threads may use one LLM: their requests run together, and each call returns its own. After an error inside
    a step every call raises EngineError with the cause.
    """

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
            self._abort_all(outbox)
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
        self.check_chat_template()
        prompts = [render_chat(self.tokenizer, conversation) for conversation in check_conversations(messages)]
        vocab_size = self.model_config.vocab_size  # the template writes the special tokens itself
        with self._encode_lock:
            token_ids = [
                encode_text(self.tokenizer, prompt, vocab_size, add_special_tokens=False) for prompt in prompts
            ]
        return [ids.tolist() for ids in token_ids]

    def check_chat_template(self) -> None:
        """Raise RequestError for a model that cannot chat."""
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise RequestError("chat needs a tokenizer with a chat template, and this model has none; use generate")

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The answer's text, piece by piece as it comes. The request is queued when the first piece is asked for;
        leaving the loop early aborts it.
        """
        if self.tokenizer is None:
            raise RequestError("stream yields text and needs a tokenizer, and this model has none; use generate")
        params = sampling_params or SamplingParams()
        if not params.detokenize:
            raise RequestError("stream yields text; leave detokenize on, or use generate")
        return self._stream(self.check_request(prompt, params), params)

    def _stream(self, token_ids: TokenIds, params: SamplingParams) -> Iterator[str]:
        outbox = Outbox()
        try:
            request_id = self._queue(token_ids, params, outbox)
            finished = False
            while not finished:
                output = self._next_output(outbox)
                finished = request_id in output.finished
                if text := output.texts.get(request_id):
                    yield text
            if error := output.finished[request_id].get("error"):
                raise EngineError(f"the request failed: {error}")
        finally:
            self._abort_all(outbox)

    def _collect(self, outbox: Outbox, num_requests: int, use_tqdm: bool) -> dict[int, RequestOutput]:
        """Outputs by request id, once all have come; meanwhile a bar shows how many have, and at what rate."""
        outputs: dict[int, RequestOutput] = {}
        rates = {"Prefill": 0.0, "Decode": 0.0}
        with tqdm(total=num_requests, desc="Generating", dynamic_ncols=True, disable=not use_tqdm) as bar:
            while len(outputs) < num_requests:
                start_s = time.perf_counter()
                output = self._next_output(outbox)
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


def _params_list(params: Any, num_prompts: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if not isinstance(params, list | tuple):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise RequestError(f"{len(params)} sampling_params for {num_prompts} prompts; give one, or one per prompt")
    return list(params)
