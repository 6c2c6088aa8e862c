"""Admission: checks whether the engine can ever run a request, and makes the Sequence of an accepted one."""

import hashlib
from dataclasses import replace

from nanovllm.core.kv_spec import KVCacheSizes
from nanovllm.core.sequence import Sequence, TokenIds
from nanovllm.core.start_report import StartReport
from nanovllm.engine.setup import EngineSetup
from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams


class Admission:
    def __init__(self, setup: EngineSetup, sizes: KVCacheSizes, report: StartReport) -> None:
        num_kv_tokens = (sizes.num_cpu_blocks or sizes.num_gpu_blocks) * setup.config.block_size
        self.max_model_len = setup.max_model_len
        self.max_request_tokens = min(setup.max_model_len, num_kv_tokens + 1)  # nothing reads the last token's K/V
        self._vocab_size = setup.model_config.vocab_size
        self._seed = setup.config.seed
        # Beyond this length, dynamic rope makes a key's rotation depend on the prompt's length, so only prompts of
        # the same length may share blocks
        self._max_shared_prompt_tokens: int | None = None
        if report.needs_rope_lens:
            self._max_shared_prompt_tokens = setup.model_config.rope.original_max_position_embeddings

    def check(self, token_ids: TokenIds, params: SamplingParams) -> None:
        """Raise RequestError for a request that can never run. `token_ids` must be in the vocabulary."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params has type {type(params).__name__}, expected SamplingParams")
        if params.n != 1:
            raise RequestError(f"n={params.n} applies to generate and chat; here, add a request for each answer")
        if not token_ids:
            raise RequestError("the prompt is empty; it needs at least one token")
        if len(token_ids) + (params.max_tokens or 1) > self.max_model_len:
            raise RequestError(
                f"prompt of {len(token_ids)} tokens + max_tokens={params.max_tokens or 1} exceeds "
                f"max_model_len={self.max_model_len}; shorten the prompt, lower max_tokens or raise max_model_len"
            )
        for name in ("stop_token_ids", "logit_bias"):
            if unknown := [token_id for token_id in getattr(params, name) or () if token_id >= self._vocab_size]:
                last = self._vocab_size - 1
                raise RequestError(f"{name} {unknown} are outside the vocabulary 0..{last}; leave them out")

    def make_sequence(
        self, request_id: int, token_ids: TokenIds, params: SamplingParams, cache_salt: str | None
    ) -> Sequence:
        """The sequence of a request that has passed `check`. Fills in the seed and max_tokens if the user gave none."""
        drawn = (self._seed * 1_000_003 + request_id) & (2**63 - 1)
        seed = drawn if params.seed is None else params.seed
        if params.max_tokens is None:
            params = replace(params, max_tokens=max(1, self.max_request_tokens - len(token_ids)))
        limit = self._max_shared_prompt_tokens
        salt = len(token_ids) if limit is not None and len(token_ids) > limit else 0
        if cache_salt is not None:
            text = f"{salt} {cache_salt}".encode(errors="surrogatepass")
            salt = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")
        return Sequence(request_id, token_ids, params, seed, salt)
