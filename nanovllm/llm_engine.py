"""LLMEngine: an LLM for scripts that name their requests and run the steps themselves, as with vLLM's LLMEngine."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.compat import CALL, no_attribute, translated
from nanovllm.config import EngineOptions
from nanovllm.errors import RequestError
from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput
from nanovllm.plan.outputs import Outbox, StepOutput, with_answers, with_logprob_lists
from nanovllm.plan.sequence import Sequence
from nanovllm.request_stream import AnswerSoFar
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.frontend import Prompt

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass
class _Answer:
    """One answer of a request."""

    seq: Sequence
    so_far: AnswerSoFar = field(default_factory=AnswerSoFar)
    ended: RequestOutput | None = None

    def add(self, results: StepOutput) -> bool:
        """Add what is new for this answer. Returns True if anything is."""
        answer_id, tokens = self.seq.seq_id, results.new_tokens.get(self.seq.seq_id)
        self.so_far.pieces.append(results.texts.get(answer_id, ""))
        if tokens is not None:
            self.so_far.token_ids += tokens.token_ids
            self.so_far.logprobs.extend(tokens.logprobs)
        self.ended = results.finished.get(answer_id, self.ended)
        return tokens is not None or answer_id in results.finished or bool(self.so_far.pieces[-1])

    def output(self, request_id: str) -> RequestOutput:
        """Return the answer so far or, if the answer has ended, its output."""
        seq, so_far, is_delta = self.seq, self.so_far, self.seq.params.output_kind == "delta"
        output = RequestOutput(
            prompt=seq.prompt, prompt_token_ids=seq.prompt_token_ids, num_prompt_tokens=seq.num_prompt_tokens
        )
        output |= self.ended or {}
        output["request_id"] = request_id
        if self.ended is None or is_delta:
            output |= {"text": "".join(so_far.pieces), "token_ids": so_far.token_ids[:]}
            output |= {"logprobs": list(so_far.logprobs)} if seq.params.logprobs is not None else {}
        if is_delta:
            self.so_far = AnswerSoFar()
        return output


class LLMEngine:
    """An LLM whose requests have names, and whose `step` returns a list of outputs.

        engine = LLMEngine.from_engine_args(EngineArgs(model="path/to/model"))
        engine.add_request("0", "Hello", SamplingParams(max_tokens=16))
        while engine.has_unfinished_requests():
            for output in engine.step():
                print(output.request_id, output.outputs[0].text, output.finished)

    The constructor takes the arguments of LLM and raises the same errors. `llm` is the LLM.
    """

    def __init__(self, model: str | Path, **options: "Unpack[EngineOptions]") -> None:
        self.llm = LLM(model, **options)
        self._outbox = Outbox()
        self._requests: dict[str, list[_Answer]] = {}  # requests that have not ended

    @classmethod
    def from_engine_args(cls, engine_args: Mapping[str, Any]) -> "LLMEngine":
        """Make an engine with these arguments, such as EngineArgs."""
        return cls(**engine_args)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name)

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, **others: Any) -> None:
        """Queue a request. others: other arguments of vLLM. Raises RequestError, and queues nothing, if the request can
        never run, or if a request with this request_id has not ended.
        """
        translated(others, (), CALL, RequestError, "LLMEngine.add_request")
        if request_id in self._requests:
            raise RequestError(f"request_id={request_id!r} belongs to a request that has not ended; give another one")
        ((*sequences,),) = self.llm.make_sequences([prompt], params)
        for seq in sequences:
            receiver = self.llm.text.receiver(self._outbox, seq.params, seq.token_ids, with_tokens=True)
            self.llm.engine.add_sequence(seq, receiver)
        self._requests[request_id] = [_Answer(seq) for seq in sequences]

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests, which get no further output. Names of requests that have ended change nothing."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            for answer in self._requests.pop(name, []):
                self.llm.abort(answer.seq.seq_id)

    def step(self) -> list[RequestOutput]:
        """Run the next step, and return an output for each request that has something new. Raises EngineError.

        An output has all answers to a prompt, as `output_kind` says: so far, what is new, or only once they have ended.
        """
        results, outputs = self.llm.engine.step(self._outbox), list[RequestOutput]()
        with_logprob_lists(results.finished.values())
        for name, answers in list(self._requests.items()):
            are_new = [answer.add(results) for answer in answers]
            has_ended = all(answer.ended is not None for answer in answers)
            if has_ended:
                del self._requests[name]
            if has_ended or (any(are_new) and answers[0].seq.params.output_kind != "final_only"):
                output = with_answers([answer.output(name) for answer in answers])
                outputs.append(output if has_ended else RequestOutput(output, finish_reason=None))
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def get_num_unfinished_requests(self) -> int:
        return len(self._requests)

    def get_tokenizer(self) -> Any:
        """Like LLM.get_tokenizer."""
        return self.llm.get_tokenizer()
