"""TextFrontend: turns prompts and conversations into token ids for the engine, and the engine's token ids into text.

    text = TextFrontend(model_config, directory)
    engine = start_engine(setup, text.end_token_ids)
    request = text.make_request("Hello", params)
    for seq in engine.make_sequences(request):
        engine.add_sequence(seq, text.receiver(outbox, seq.params, seq.token_ids))

`make_request` is the only gate between users and the engine: the code after it trusts a Request. Bad prompts and
messages raise RequestError; no check changes the engine. A model without a tokenizer has a frontend too, which accepts
only token ids and makes no text. Any thread may call any method.
"""

import threading
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from operator import index
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypedDict

import numpy as np

from nanovllm.capabilities.edits.logit_editor import BadWords, TokenTable
from nanovllm.checkpoint.files import has_default_template
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.errors import RequestError
from nanovllm.plan.logit_edits import AnswerRules
from nanovllm.plan.outputs import Outbox, Receiver
from nanovllm.plan.sequence import Request, TokenIds
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import (
    REPLACEMENT,
    Detokenizer,
    StopStrings,
    TextReceiver,
    TokenDecoder,
    read_token_bytes,
)
from nanovllm.text.structured import GrammarCompiler, TokenMatcher
from nanovllm.text.tokenizer import TextEncoder, end_token_ids, load_tokenizer
from nanovllm.utils.options import shown

MAX_BAD_WORDS = MAX_STOP_STRINGS = 16  # lists in the caches; all answers of a request share one list
MAX_BAD_WORD_BYTES = 16_384  # in a request; preparing this many takes up to 0.2 s, and a step at most 0.1 ms

# A string, token ids, or as in vLLM a dict: {"prompt": str} or {"prompt_token_ids": token ids}. A dict may also have a
# "cache_salt"
Prompt: TypeAlias = str | Sequence[int] | np.ndarray | Mapping[str, Any]
_PROMPT_KEYS = ("prompt", "prompt_token_ids")
Message: TypeAlias = dict[str, Any]


class TextPrompt(TypedDict, total=False):
    """A prompt with the keys of vLLM's TextPrompt. cache_salt: prompts share KV only if their salts are equal."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt with the keys of vLLM's TokensPrompt. prompt: the text, which the output repeats."""

    prompt_token_ids: Sequence[int]
    prompt: str
    cache_salt: str


class _BadWordFinder:
    """Makes BadWords of a request's words, for one tokenizer."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._decoder = TokenDecoder(tokenizer, skip_special_tokens=True)
        self._table: TokenTable | None = None  # made at the first use

    def find(self, words: tuple[str, ...], skips_special: bool, endings: tuple[int, ...]) -> BadWords:
        """Return the BadWords of these words. Raises RequestError for unusable words.

        endings: the tokens that end the answer and are not in the answer's text.
        """
        for word in words:
            if REPLACEMENT in word or any("\ud800" <= char <= "\udfff" for char in word):
                raise RequestError(
                    f"SamplingParams.bad_words has {word!r}, which is not valid Unicode text; leave it out"
                )
        found = [word.encode() for word in words]
        if (num_bytes := sum(map(len, found))) > MAX_BAD_WORD_BYTES:
            raise RequestError(
                f"SamplingParams.bad_words has {num_bytes} bytes in all, at most {MAX_BAD_WORD_BYTES}; leave some "
                "words out"
            )
        if self._table is None:
            try:
                self._table = TokenTable(read_token_bytes(self._tokenizer, self._vocab_size))
            except ValueError as error:
                raise RequestError(f"bad_words cannot be used with this model's tokenizer: {error}") from error
        added = self._tokenizer.get_added_vocab().values() if skips_special else ()
        silent = {token_id for token_id in added if not self._decoder.visible([token_id])}
        bad_words = BadWords(found, self._table, self._vocab_size, silent | {*endings})
        if bad_words.forbids_all:
            raise RequestError(
                f"SamplingParams.bad_words forbids all {self._vocab_size} tokens of the model's vocabulary; leave some "
                "words out"
            )
        return bad_words


class TextFrontend:
    def __init__(self, model_config: ModelConfig, directory: Path | None) -> None:
        """directory: the model's directory, or None for a preset, which has no tokenizer. Raises CheckpointError if the
        tokenizer cannot be read.
        """
        self.tokenizer = load_tokenizer(directory)
        self.end_token_ids = end_token_ids(model_config, self.tokenizer)
        self._vocab_size = model_config.vocab_size
        self._encode_lock = threading.Lock()  # a tokenizer can encode for only one thread at a time
        self._bad_words_lock = threading.Lock()
        self._decoders: dict[bool, TokenDecoder] = {}  # by skip_special_tokens
        self.special_tokens: frozenset[str] = frozenset()  # which skip_special_tokens leaves out of texts
        if self.tokenizer is not None:
            added = self.tokenizer.added_tokens_decoder.values()
            self.special_tokens = frozenset(token.content for token in added if token.special)
            self._encoder = TextEncoder(self.tokenizer)
            self._decoders = {skip: TokenDecoder(self.tokenizer, skip) for skip in (True, False)}
            self._bad_words = lru_cache(MAX_BAD_WORDS)(_BadWordFinder(self.tokenizer, self._vocab_size).find)
        self._stop_strings = lru_cache(MAX_STOP_STRINGS)(StopStrings)
        self._num_resets = 0  # of the prefix cache
        self._grammars = GrammarCompiler(self.tokenizer, self._vocab_size, self.end_token_ids)

    # -- requests ------------------------------------------------------------------------------------------------

    def make_requests(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | list[SamplingParams] | None
    ) -> list[Request]:
        """Make the requests of one prompt or several.

        params: for all prompts, or a list with one for each; None means SamplingParams().
        """
        listed = prompt_list(prompts)
        if not isinstance(params, list | tuple):
            params = [SamplingParams() if params is None else params] * len(listed)
        if len(params) != len(listed):
            raise RequestError(f"{len(params)} sampling_params for {len(listed)} prompts; give one, or one per prompt")
        return list(map(self.make_request, listed, params))

    def make_request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Check a prompt and its parameters. Raises RequestError for a request that no engine of this model can run.

        Tokenizing a long text or compiling a grammar can take a second.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params has type {type(params).__name__}, expected SamplingParams")
        content, cache_salt = content_and_salt(prompt)
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else content
        token_ids = self.encode_prompt(content, cache_salt=cache_salt)
        if not token_ids:
            raise RequestError("the prompt is empty; it needs at least one token")
        for name in ("stop_token_ids", "logit_bias"):
            if unknown := [token_id for token_id in getattr(params, name) or () if token_id >= self._vocab_size]:
                last = self._vocab_size - 1
                raise RequestError(f"{name} {unknown} are outside the vocabulary 0..{last}; leave them out")
        text = text if isinstance(text, str) else None
        if self._num_resets:
            cache_salt = f"{self._num_resets} resets {cache_salt or ''}"
        return Request(token_ids, params, self.rules(params), cache_salt, text)

    def reset_prefix_cache(self) -> None:
        """Let later requests share no KV with requests made until now, by giving them another salt."""
        self._num_resets += 1

    def encode_prompt(
        self, prompt: str | Sequence[int], *, add_special_tokens: bool = True, cache_salt: str | None = None
    ) -> TokenIds:
        """Return the token ids (int64) of a text, or a copy of token ids.

        add_special_tokens: let the tokenizer add special tokens to a text. cache_salt: the salt of the request.
        Raises RequestError for prompts of other types, for ids outside the vocabulary, and for text if the model has
        no tokenizer.
        """
        if not isinstance(prompt, str):
            return check_token_ids(prompt, self._vocab_size)
        if self.tokenizer is None:
            raise RequestError("a text prompt needs a tokenizer, but this model has none; give a list of token ids")
        return self._encode(prompt, add_special_tokens, cache_salt)

    def _encode(self, text: str, add_special_tokens: bool, cache_salt: str | None) -> TokenIds:
        """Encode a text. Raises RequestError if a token is outside the model's vocabulary.

        A tokenizer may have tokens for which the model has no embedding, such as a <pad> that was added for training.
        """
        try:
            with self._encode_lock:
                token_ids = self._encoder.encode(text, add_special_tokens=add_special_tokens, cache_salt=cache_salt)
        except (TypeError, UnicodeError) as error:  # lone surrogates, from os.fsdecode or from half of a JSON escape
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

    def decode(self, token_ids: Iterable[int], *, after: Iterable[int] = ()) -> str:
        """Return the text of tokens, including special tokens. Raises RequestError like `encode_prompt`.

        after: the tokens before `token_ids`, whose text is left out; the last preceding token is enough.
        """
        before, listed = (check_token_ids(list(each), self._vocab_size).tolist() for each in (after, token_ids))
        if self.tokenizer is None:
            raise RequestError("the text of tokens needs a tokenizer, but this model has none")
        decode = self._decoders[False].decode
        return decode(before + listed)[len(decode(before)) :]

    def rules(self, params: SamplingParams) -> AnswerRules:
        """Return bad_words and structured_outputs as rules on tokens.

        Raises RequestError for parameters that need a missing tokenizer, and for unusable bad_words or grammars.
        """
        if self.tokenizer is None:
            if params.stop:
                raise RequestError("stop strings need a tokenizer, but this model has none; use stop_token_ids")
            if params.bad_words:
                raise RequestError("bad_words need a tokenizer, but this model has none; use logit_bias")
        make_constraint = None
        if params.structured_outputs is not None:
            grammar = self._grammars.compile(params.structured_outputs, params.reasoning_tags)
            make_constraint = partial(TokenMatcher, grammar, params.ignore_eos)
        return AnswerRules(self._bad_words_of(params), make_constraint)

    def _bad_words_of(self, params: SamplingParams) -> BadWords | None:
        if not params.bad_words:
            return None
        endings = () if params.ignore_eos else self.end_token_ids
        endings = () if params.include_stop_str_in_output else (*endings, *(params.stop_token_ids or ()))
        with self._bad_words_lock:
            return self._bad_words(tuple(params.bad_words), params.skip_special_tokens, endings)

    def check_stream(self, params: SamplingParams) -> None:
        """Raise RequestError for a request whose text cannot be streamed."""
        if self.tokenizer is None:
            raise RequestError("stream yields text and needs a tokenizer, but this model has none; use generate")
        if not params.detokenize:
            raise RequestError("stream yields text; leave detokenize on, or use generate")

    def receiver(
        self, outbox: Outbox, params: SamplingParams, prompt: Sequence[int], with_tokens: bool = False
    ) -> Receiver:
        """Make the Receiver of one answer, which decodes tokens if the model has a tokenizer and `detokenize` is on.

        prompt: the prompt's token ids. with_tokens: whether the Receiver also delivers the ids of new tokens.
        """
        if not self._decoders or not params.detokenize:
            return Receiver(outbox, with_tokens)
        decoder = self._decoders[params.skip_special_tokens]
        detokenizer = Detokenizer(
            decoder,
            self._stop_strings(tuple(params.stop or ())),
            params.include_stop_str_in_output,
            prompt=prompt,
            min_tokens=params.min_tokens,
            reasoning=params.reasoning_tags,
        )
        return TextReceiver(outbox, detokenizer, with_tokens, text_of=self._decoders[False].token_text)

    # -- chat ----------------------------------------------------------------------------------------------------

    def check_chat_template(self) -> None:
        """Raise RequestError for a model that cannot chat."""
        if self.tokenizer is None or not has_default_template(self.tokenizer.chat_template):
            raise RequestError("chat needs a tokenizer with a chat template, but this model has none; use generate")

    def encode_chat(
        self,
        messages: list[Message] | list[list[Message]],
        *,
        cache_salt: str | None = None,
        template_options: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[TokensPrompt]:
        """Return the prompt of each conversation, by default up to the beginning of the answer.

        messages: one conversation or a list of conversations. cache_salt: the requests' salt. template_options: see
        `render_chat`. Raises RequestError like `check_chat_template`, and for messages that are malformed or that the
        template refuses.
        """
        if template_options.get("chat_template") is None or self.tokenizer is None:
            self.check_chat_template()
        if template_options.get("tools") and "tools" not in self.chat_template(template_options.get("chat_template")):
            raise RequestError("the model's chat template does not take tools; leave them out")
        conversations = check_conversations(messages)
        texts = [render_chat(self.tokenizer, conversation, template_options) for conversation in conversations]
        return [{"prompt": text, "prompt_token_ids": self._encode(text, False, cache_salt)} for text in texts]

    def chat_template(self, given: str | None = None) -> str:
        """Return the source of the chat template, `given` or the model's own; of all if the model has several."""
        template = given or getattr(self.tokenizer, "chat_template", None) or ""
        return "\n".join(template.values()) if isinstance(template, dict) else template


# -- checks of prompts and messages ------------------------------------------------------------------------------------


def prompt_list(prompts: Any) -> list[Any]:
    """Make a list from one prompt or an iterable of prompts. The prompts themselves are checked later."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts has type {type(prompts).__name__}, expected a prompt (a string, a list of token ids or a dict) "
            "or several"
        )
    listed = prompts if isinstance(prompts, list | tuple | range | array | np.ndarray) else list(prompts)
    is_one = len(listed) > 0 and isinstance(listed[0], int | np.integer)
    return [listed] if is_one else list(listed)


def content_and_salt(prompt: Any) -> tuple[Any, str | None]:
    """Return the text or the token ids of a prompt, and its cache salt. As in vLLM, token ids precede text.

    Only prompts with equal salts share KV, and prompts without a salt share KV with each other.
    """
    if not isinstance(prompt, Mapping):
        return prompt, None
    salt = prompt.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise RequestError(f"cache_salt={salt!r} must be a non-empty string")
    unknown = [key for key in prompt if key not in (*_PROMPT_KEYS, "cache_salt") and prompt[key] is not None]
    found = [prompt[key] for key in reversed(_PROMPT_KEYS) if prompt.get(key) is not None]
    if unknown or not found:
        raise RequestError(
            f"a prompt is a dict with the keys {', '.join(map(repr, prompt)) or 'none'}; expected "
            '{"prompt": text} or {"prompt_token_ids": token ids}'
        )
    return found[0], salt


def check_token_ids(prompt: Any, vocab_size: int) -> TokenIds:
    """Copy a prompt of token ids into a new array. Raises RequestError unless all are integers in the vocabulary.

    prompt: a list, a tuple, a range, or a one-dimensional array of integers. A prompt can have a million ids, so this
    function runs no Python code for each id.
    """
    if isinstance(prompt, array | np.ndarray):
        numbers = np.asarray(prompt)
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            shape, dtype = numbers.shape, numbers.dtype
            raise RequestError(f"a prompt is an array of {dtype} of shape {shape}, expected integers in one dimension")
        token_ids = array("q")
        token_ids.frombytes(np.ascontiguousarray(numbers, np.int64).view(np.uint8).data)
    elif isinstance(prompt, list | tuple | range):
        try:
            token_ids = array("q", prompt)
        except (TypeError, OverflowError) as error:
            raise _bad_token_id(prompt, vocab_size) from error
        places = np.flatnonzero(np.frombuffer(token_ids, np.uint64) < 2)  # only there an array takes a bool
        if bool in {type(prompt[place]) for place in places}:
            raise _bad_token_id(prompt, vocab_size)
    else:
        raise RequestError(f"a prompt has type {type(prompt).__name__}, expected a string or a list of token ids")
    if not are_in_vocabulary(token_ids, vocab_size):
        raise _bad_token_id(prompt, vocab_size)
    return token_ids


def are_in_vocabulary(token_ids: TokenIds, vocab_size: int) -> bool:
    """Return True if all ids are from 0 to vocab_size - 1. As unsigned numbers, negative ids are huge."""
    return not token_ids or bool(np.frombuffer(token_ids, dtype=np.uint64).max() < vocab_size)


def _bad_token_id(prompt: Sequence[Any], vocab_size: int) -> RequestError:
    """Return the error about the first id that is not an integer or is outside the vocabulary."""
    for position, token_id in enumerate(prompt):
        try:
            number = index(token_id)
        except TypeError:
            number = None
        if number is None or isinstance(token_id, bool):
            return RequestError(f"token_ids[{position}]={token_id!r} is not an integer; give a string or token ids")
        if not 0 <= number < vocab_size:
            return RequestError(
                f"token_ids[{position}]={number} is outside the vocabulary 0..{vocab_size - 1}; use the tokenizer "
                "that belongs to this model"
            )
    raise AssertionError("an id of the prompt was refused, but all are valid")


def check_conversations(messages: Any) -> list[list[Mapping[str, Any]]]:
    """Check `messages`, one conversation or a list of conversations, and return a list of conversations."""
    if not isinstance(messages, list | tuple):
        raise RequestError(f'messages has type {type(messages).__name__}, expected a list of {{"role", "content"}}')
    if not messages:
        raise RequestError("messages is empty; give at least one message")
    conversations: list[Any] = list(messages) if isinstance(messages[0], list | tuple) else [messages]
    for number, conversation in enumerate(conversations):
        if not isinstance(conversation, list | tuple):
            raise RequestError("messages mixes messages and lists of messages; give one conversation or a list of them")
        if not conversation:
            raise RequestError("a conversation in messages is empty; give each at least one message")
        for i, message in enumerate(conversation):
            _check_message(message, f"messages[{i}]")
        conversations[number] = [
            _with_joined_parts(message, f"messages[{i}]") for i, message in enumerate(conversation)
        ]
    return conversations


def _with_joined_parts(message: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the message with one string in place of content parts, for templates know only strings."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f'{name} has a part {shown(part)}, expected {{"type": "text", "text": ...}}')
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _check_message(message: Any, name: str) -> None:
    if not isinstance(message, Mapping):
        raise RequestError(f'{name} has type {type(message).__name__}, expected a dict of "role" and "content"')
    if not isinstance(message.get("role"), str):
        raise RequestError(f'{name} has role={message.get("role")!r}, expected a string such as "user"')
    content = message.get("content")
    if not isinstance(content, str | list | tuple) and not (content is None and message.get("tool_calls")):
        raise RequestError(f"{name} has content={content!r}, expected a string")


def render_chat(
    tokenizer: Any, conversation: list[Mapping[str, Any]], template_options: Mapping[str, Any] = MappingProxyType({})
) -> str:
    """Render the conversation with the model's chat template, by default up to the beginning of the answer.

    template_options: chat_template, tools, add_generation_prompt, continue_final_message, and the template's own
    variables.
    """
    from jinja2 import TemplateSyntaxError

    options = {"add_generation_prompt": True, **template_options, "tokenize": False}
    try:
        prompt: str = tokenizer.apply_chat_template(conversation, **options)
    except TemplateSyntaxError as error:
        raise RequestError(
            f"the model's chat template is not a valid Jinja template (line {error.lineno}: {error}); correct it in "
            "chat_template.jinja or tokenizer_config.json"
        ) from error
    except Exception as error:  # a template is a program, and may raise anything, even on purpose
        raise RequestError(
            f"the model's chat template cannot render these messages: {error}; check their roles and their order"
        ) from error
    return prompt
