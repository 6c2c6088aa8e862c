"""TextFrontend: turns prompts and conversations into token ids for the engine, and its token ids into text.

    text = TextFrontend(model_config, directory)
    engine = start_engine(setup, text.end_token_ids)
    engine.add_request(text.encode_prompt("Hello"), params, text.receiver(outbox, params))

A model without a tokenizer has a frontend too, which accepts only token ids and makes no text. Any thread may call any
method.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.core.logit_editor import AnswerRules, BadWords
from nanovllm.core.outputs import Outbox, Receiver
from nanovllm.core.sequence import TokenIds
from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.answer import TextReceiver
from nanovllm.text.bad_words import bad_word_token_ids
from nanovllm.text.detokenizer import Detokenizer, StopStrings, TokenDecoder
from nanovllm.text.grammar import Grammar
from nanovllm.text.request_check import (
    Prompt,
    cache_salt,
    check_conversations,
    check_token_ids,
    encode_text,
    render_chat,
    text_or_token_ids,
)
from nanovllm.text.structured import GrammarCompiler, TokenMatcher
from nanovllm.text.text_encoder import TextEncoder
from nanovllm.text.tokenizer import end_token_ids, load_tokenizer

MAX_BAD_WORDS = MAX_STOP_STRINGS = 16  # lists of them that are kept; all answers of a request have the same

Message: TypeAlias = dict[str, Any]


class TextFrontend:
    def __init__(self, model_config: ModelConfig, directory: Path | None) -> None:
        """`directory` is None for a preset, which has no tokenizer. Raises CheckpointError if one cannot be read."""
        self.tokenizer = load_tokenizer(directory)
        self.end_token_ids = end_token_ids(model_config, self.tokenizer)
        self._vocab_size = model_config.vocab_size
        self._encode_lock = threading.Lock()  # a tokenizer can encode for only one thread at a time
        self._decoders: dict[bool, TokenDecoder] = {}  # by skip_special_tokens
        if self.tokenizer is not None:
            self._encoder = TextEncoder(self.tokenizer)
            self._decoders = {skip: TokenDecoder(self.tokenizer, skip) for skip in (True, False)}
        self._bad_words = lru_cache(MAX_BAD_WORDS)(partial(_find_bad_words, self.tokenizer, self._vocab_size))
        self._stop_strings = lru_cache(MAX_STOP_STRINGS)(StopStrings)
        self._grammars = GrammarCompiler(self.tokenizer, self._vocab_size, self.end_token_ids)

    def encode_prompt(self, prompt: Prompt, *, add_special_tokens: bool = True) -> TokenIds:
        """Return the prompt's token ids (int64). `add_special_tokens`: a text gets those that the tokenizer adds.

        Raises RequestError for prompts of other types, for ids outside the vocabulary, and for text if the model has
        no tokenizer.
        """
        salt, prompt = cache_salt(prompt), text_or_token_ids(prompt)
        if not isinstance(prompt, str):
            return check_token_ids(prompt, self._vocab_size)
        if self.tokenizer is None:
            raise RequestError("a text prompt needs a tokenizer, but this model has none; give a list of token ids")
        return self._encode(prompt, add_special_tokens, salt)

    def _encode(self, text: str, add_special_tokens: bool, cache_salt: str | None) -> TokenIds:
        with self._encode_lock:
            return encode_text(
                self._encoder,
                text,
                self._vocab_size,
                add_special_tokens=add_special_tokens,
                cache_salt=cache_salt,
            )

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of tokens, special ones included. Raises RequestError as `encode_prompt` does."""
        token_ids = check_token_ids(list(token_ids), self._vocab_size)
        if self.tokenizer is None:
            raise RequestError("the text of tokens needs a tokenizer, but this model has none")
        text: str = self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)
        return text

    def check_params(self, params: SamplingParams) -> None:
        """Raise RequestError for parameters that need text if the model has no tokenizer, and for bad_words and
        structured_outputs that cannot be used. Compiling a grammar can take a second.
        """
        if self.tokenizer is None:
            if params.stop:
                raise RequestError("stop strings need a tokenizer, but this model has none; use stop_token_ids")
            if params.bad_words:
                raise RequestError("bad_words need a tokenizer, but this model has none; use logit_bias")
        self._bad_words_of(params)
        self._grammar_of(params)

    def rules(self, params: SamplingParams) -> AnswerRules:
        """What bad_words and structured_outputs mean in tokens, for one answer. Raises RequestError as `check_params`
        does.
        """
        bad_words, grammar = self._bad_words_of(params), self._grammar_of(params)
        return AnswerRules(bad_words, None if grammar is None else TokenMatcher(grammar, params.ignore_eos))

    def _bad_words_of(self, params: SamplingParams) -> BadWords | None:
        if not params.bad_words:
            return None
        with self._encode_lock:
            return self._bad_words(tuple(params.bad_words))

    def _grammar_of(self, params: SamplingParams) -> Grammar | None:
        return None if params.structured_outputs is None else self._grammars.compile(params.structured_outputs)

    def check_stream(self, params: SamplingParams) -> None:
        """Raise RequestError for a request whose text cannot be streamed."""
        if self.tokenizer is None:
            raise RequestError("stream yields text and needs a tokenizer, but this model has none; use generate")
        if not params.detokenize:
            raise RequestError("stream yields text; leave detokenize on, or use generate")

    def receiver(self, outbox: Outbox, params: SamplingParams, with_tokens: bool = False) -> Receiver:
        """Make one request's Receiver. It decodes the tokens if the model has a tokenizer and `detokenize` is on.

        `with_tokens`: it also delivers the ids of new tokens as they arrive.
        """
        if not self._decoders or not params.detokenize:
            return Receiver(outbox, with_tokens)
        decoder = self._decoders[params.skip_special_tokens]
        detokenizer = Detokenizer(
            decoder,
            self._stop_strings(tuple(params.stop or ())),
            params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        return TextReceiver(outbox, detokenizer, with_tokens, text_of=self._decoders[False].token_text)

    # -- chat ----------------------------------------------------------------------------------------------------

    def check_chat_template(self) -> None:
        """Raise RequestError for a model that cannot chat."""
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise RequestError("chat needs a tokenizer with a chat template, but this model has none; use generate")

    def encode_chat(
        self,
        messages: list[Message] | list[list[Message]],
        template_options: Mapping[str, Any] = MappingProxyType({}),
        *,
        add_special_tokens: bool = False,
        cache_salt: str | None = None,
        check_text: Callable[[str], None] = lambda text: None,
    ) -> list[TokenIds]:
        """The token ids of each conversation, by default up to where the answer begins.

        messages: one conversation or a list of them. template_options: what else the template gets, such as `tools`, or
        add_generation_prompt=False. add_special_tokens: in addition to those that the template writes. cache_salt: that
        of the requests. check_text: is called with each text before it is tokenized, and may raise. Raises RequestError
        as `check_chat_template` does, and for messages that are malformed or that the template refuses.
        """
        self.check_chat_template()
        conversations = check_conversations(messages)
        prompts = [render_chat(self.tokenizer, conversation, template_options) for conversation in conversations]
        for text in prompts:
            check_text(text)
        return [self._encode(text, add_special_tokens, cache_salt) for text in prompts]


def _find_bad_words(tokenizer: Any, vocab_size: int, words: tuple[str, ...]) -> BadWords:
    return BadWords(bad_word_token_ids(tokenizer, words, vocab_size))
