"""TextFrontend: turns prompts and conversations into token ids for the engine, and its token ids into text.

    text = TextFrontend(model_config, directory)
    engine = start_engine(setup, text.end_token_ids)
    engine.add_request(text.encode_prompt("Hello"), params, text.receiver(outbox, params))

A model without a tokenizer has a frontend too, which accepts only token ids and makes no text. Any thread may call any
method.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from nanovllm.checkpoint.files import TOKENIZER_FILES, read_json
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.core.logit_editor import AnswerRules, BadWords
from nanovllm.core.outputs import Outbox, Receiver
from nanovllm.core.sequence import TokenIds
from nanovllm.errors import CheckpointError, RequestError
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import Detokenizer, StopStrings, TextReceiver, TokenDecoder
from nanovllm.text.request_check import (
    Prompt,
    are_in_vocabulary,
    cache_salt,
    check_conversations,
    check_token_ids,
    render_chat,
    text_or_token_ids,
)
from nanovllm.text.structured import Grammar, GrammarCompiler, TokenMatcher
from nanovllm.text.text_encoder import TextEncoder

MAX_TOKENS = 16_384  # of a request's bad words: they take 15 ms to prepare, and a step at most 0.1 ms
MAX_CHARS = 16 * MAX_TOKENS  # checked before anything is tokenized; few texts have as many characters for each token


def bad_word_token_ids(tokenizer: Any, words: Sequence[str], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that must not occur in an answer without these words, as vLLM defines them.

    A word is encoded as the start of a text and as a later word, after a space. The second encoding counts only if it
    begins with another token and is as long as the first; else it is the first one after a token for the space. Other
    ways to spell the word with smaller tokens are not found. Raises RequestError for a word that has no tokens, for too
    many tokens, and if the words leave no token to sample.
    """
    _check_size("characters", sum(map(len, words)), MAX_CHARS)
    found: list[tuple[int, ...]] = []
    for word in words:
        if any("\ud800" <= char <= "\udfff" for char in word):
            raise RequestError(f"SamplingParams.bad_words has {word!r}, which is not valid Unicode text; leave it out")
        first = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        if not first or max(first) >= vocab_size:
            raise RequestError(
                f"SamplingParams.bad_words has {word!r}, which has no tokens in the model's vocabulary; leave it out"
            )
        found.append(first)
        later = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        if len(later) == len(first) and later[0] != first[0] and max(later) < vocab_size:
            found.append(later)
    _check_size("tokens", sum(map(len, found)), MAX_TOKENS)
    if len({word for word in found if len(word) == 1}) == vocab_size:
        raise RequestError(
            f"SamplingParams.bad_words forbids all {vocab_size} tokens of the model's vocabulary; leave some words out"
        )
    return tuple(found)


def _check_size(unit: str, count: int, limit: int) -> None:
    if count > limit:
        raise RequestError(f"SamplingParams.bad_words has {count} {unit} in all, at most {limit}; leave some words out")


# A directory that has any of these files has a tokenizer
_TOKENIZER_MARKS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_tokenizer(directory: Path | None) -> Any:
    """Load the model's tokenizer. Returns None for a preset and for a directory without one.

    Raises CheckpointError, which names the file, if the tokenizer cannot be read. Never runs code from the checkpoint.
    """
    files = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()] if directory else []
    if not any(file.name in _TOKENIZER_MARKS for file in files):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
    except Exception as error:  # transformers passes on what its parsers raise, which does not name the file
        for file in files:
            if file.suffix == ".json":
                read_json(file)
        raise CheckpointError(
            f"the tokenizer in {directory} cannot be read ({type(error).__name__}: {error}); download its files again: "
            f"{', '.join(file.name for file in files)}"
        ) from error


def end_token_ids(model_config: ModelConfig, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end an answer: those of the model's configs, and the tokenizer's eos token.

    The configs of some chat models name only the base model's end token. vLLM uses the tokenizer's too.
    """
    token_ids = list(model_config.eos_token_ids)
    of_tokenizer = getattr(tokenizer, "eos_token_id", None)
    if of_tokenizer is not None and of_tokenizer < model_config.vocab_size and of_tokenizer not in token_ids:
        token_ids.append(of_tokenizer)
    return tuple(token_ids)


MAX_BAD_WORDS = MAX_STOP_STRINGS = 16  # lists in the caches; all answers of a request have the same

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
        """Encode a text. Raises RequestError if a token is outside the model's vocabulary.

        A tokenizer may have tokens for which the model has no embedding, such as a <pad> that was added for training.
        """
        try:
            with self._encode_lock:
                token_ids = self._encoder.encode(text, add_special_tokens=add_special_tokens, cache_salt=cache_salt)
        except (TypeError, UnicodeError) as error:  # lone surrogates, from os.fsdecode or half of a JSON escape
            raise RequestError(
                f"the prompt is not valid Unicode text; remove lone surrogates from it ({error})"
            ) from error
        if not are_in_vocabulary(token_ids, self._vocab_size):
            position, token_id = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < self._vocab_size)
            token = self.tokenizer.convert_ids_to_tokens(token_id)
            raise RequestError(
                f"the prompt's text contains {token!r}, token {token_id} (at position {position} of its tokens), which "
                f"is outside the model's vocabulary 0..{self._vocab_size - 1}; remove it from the text, or use the "
                "tokenizer that belongs to these weights"
            )
        return token_ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of tokens, special ones included. Raises RequestError as `encode_prompt` does."""
        token_ids = check_token_ids(list(token_ids), self._vocab_size)
        if self.tokenizer is None:
            raise RequestError("the text of tokens needs a tokenizer, but this model has none")
        text: str = self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)
        return text

    def check_params(self, params: SamplingParams) -> None:
        """Raise RequestError for parameters that need a missing tokenizer, and for unusable bad_words or grammars.

        Compiling a grammar can take a second.
        """
        if self.tokenizer is None:
            if params.stop:
                raise RequestError("stop strings need a tokenizer, but this model has none; use stop_token_ids")
            if params.bad_words:
                raise RequestError("bad_words need a tokenizer, but this model has none; use logit_bias")
        self._bad_words_of(params)
        self._grammar_of(params)

    def rules(self, params: SamplingParams) -> AnswerRules:
        """Return bad_words and structured_outputs as rules on tokens. Raises RequestError as `check_params` does."""
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
        """Return the token ids of each conversation, by default up to where the answer begins.

        messages: one conversation or a list of them. template_options: further arguments of the template, such as
        `tools`, or add_generation_prompt=False. add_special_tokens: in addition to those that the template writes.
        cache_salt: the requests' salt. check_text: called with each text before it is tokenized; may raise. Raises
        RequestError as `check_chat_template` does, and for messages that are malformed or that the template refuses.
        """
        self.check_chat_template()
        conversations = check_conversations(messages)
        prompts = [render_chat(self.tokenizer, conversation, template_options) for conversation in conversations]
        for text in prompts:
            check_text(text)
        return [self._encode(text, add_special_tokens, cache_salt) for text in prompts]


def _find_bad_words(tokenizer: Any, vocab_size: int, words: tuple[str, ...]) -> BadWords:
    return BadWords(bad_word_token_ids(tokenizer, words, vocab_size))
