"""A CheckedLLM for the GPU: it records the logits of graph replays too, and never makes the host wait for them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from checked_engine import CheckedLLM, Reference, greedy
from transformers import AutoModelForCausalLM

from nanovllm.capabilities.draft_head.drafts import HeadGraphs
from nanovllm.plan.outputs import RequestOutput
from nanovllm.runner.cuda_graphs import MixedGraphs


class GpuLLM(CheckedLLM):
    """Graphs on, unless told otherwise. `num_replays`: steps run by "resident", by "streamed" graphs and so on, and
    drafts under "draft".
    """

    def __init__(self, reference: Reference, **options: Any) -> None:
        super().__init__(reference, **({"device": "cuda", "enforce_eager": False, "max_num_seqs": 6} | options))
        self.num_replays: Counter[str] = Counter()
        for graphs in self.runner.graphs.kinds:
            returns_logits = not isinstance(graphs, MixedGraphs | HeadGraphs)
            graphs.replay = self._counted(graphs.name, graphs.replay, returns_logits)

    def _counted(
        self, name: str, replay: Callable[..., torch.Tensor], returns_logits: bool
    ) -> Callable[..., torch.Tensor]:
        def counting_replay(*args: Any) -> torch.Tensor:
            result = replay(*args)
            self.num_replays["draft" if self.is_drafting else name] += 1
            if returns_logits and not self.is_drafting:
                self.record_logits(result.float().clone())  # stays on the GPU
            return result

        return counting_replay

    def _recording_compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """For steps that are launched kernel by kernel. A graph does not come here; _counted records its logits."""
        logits = self._compute_logits(hidden, out)
        if not self.is_drafting:
            self.record_logits(logits.float().clone())
        return logits

    def rows(self, request_id: int, num_tokens: int) -> torch.Tensor:
        """Logits of a request's first tokens, [num_tokens, vocab_size], on the CPU."""
        return torch.stack(self.logits[request_id][:num_tokens]).cpu()

    def assert_as_good_as_plain_torch(self, prompts: list[list[int]], num_tokens: int = 16) -> None:
        """Error of the logits against fp32 at most twice that of transformers in the engine's dtype."""
        dtype = self.runner.dtype
        plain: Any = AutoModelForCausalLM.from_pretrained(self.reference.directory, dtype=dtype).cuda()
        errors: dict[str, list[torch.Tensor]] = {"engine": [], "plain": []}
        ids = [self.add_request(prompt, greedy(num_tokens)) for prompt in prompts]
        finished = self.finish_all()
        for request_id, prompt in zip(ids, prompts, strict=True):
            answer = finished[request_id]["token_ids"]
            token_ids = prompt + answer[:-1]
            expected = self.reference.logits(token_ids, len(answer))
            with torch.inference_mode():
                hidden = plain.model(torch.tensor([token_ids]).to(plain.device)).last_hidden_state
                plain_rows = plain.lm_head(hidden[0, -len(answer) :]).float().cpu()
            errors["plain"].append(plain_rows - expected)
            errors["engine"].append(self.rows(request_id, len(answer)) - expected)
        mean = {name: torch.cat(parts).square().mean().sqrt().item() for name, parts in errors.items()}
        largest = {name: torch.cat(parts).abs().max().item() for name, parts in errors.items()}
        assert mean["engine"] <= 2 * mean["plain"], mean
        assert largest["engine"] <= 2 * largest["plain"], largest

    def check(self, request_id: int, prompt: list[int], output: RequestOutput) -> None:
        rows = self.rows(request_id, len(output["token_ids"]))  # a step may have run ahead
        self.reference.check(prompt, output["token_ids"], list(rows))
