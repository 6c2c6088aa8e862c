"""Answers as sequences of blocks: what the APIs of responses and of messages have in common."""

import json
import secrets
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from nanovllm.core.outputs import RequestOutput
from nanovllm.request_stream import RequestUpdate
from nanovllm.server.admission import Service
from nanovllm.server.answers import ChatAnswer, ChatForm
from nanovllm.server.protocol import ChatRequest
from nanovllm.server.tool_calls import ToolCallDelta

BlockKind: TypeAlias = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """A part of an answer: its reasoning, its text, or a tool call."""

    kind: BlockKind
    index: int
    block_id: str
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)  # one string would be copied for each token

    @property
    def text(self) -> str:
        """For a call its arguments."""
        return "".join(self.pieces)


class BlockAnswer(ChatAnswer):
    """A chat answer as a sequence of blocks, each with events for its beginning, its pieces and its end.

    The APIs of this form have one answer per request, and name the type of each event.
    """

    end = b""

    def __init__(self, service: Service, body: ChatRequest, form: ChatForm) -> None:
        super().__init__(service, body, form)
        self._blocks: list[Block] = []
        self._output: RequestOutput | None = None

    @abstractmethod
    def _body_of(self, output: RequestOutput | None) -> dict[str, Any]:
        """The response with all blocks so far; `output` is None before its end."""

    @abstractmethod
    def _begun_events(self, block: Block) -> list[dict[str, Any]]: ...

    @abstractmethod
    def _piece_event(self, block: Block, piece: str) -> dict[str, Any]: ...

    @abstractmethod
    def _ended_events(self, block: Block) -> list[dict[str, Any]]: ...

    def _sse(self, events: Iterable[dict[str, Any]]) -> str:
        return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        (self._output,) = outputs
        self._count(0, self._output["token_ids"], self._output)
        self._add(self._output["text"] or "", is_last=True)
        return self._body_of(self._output)

    def update_events(self, update: RequestUpdate) -> str:
        if update.output is not None:
            self._output = update.output
            self._count(0, update.output["token_ids"], update.output)
        return self._sse(self._add(update.text, is_last=update.output is not None))

    def _add(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        """Add what `text` says to the blocks, and return the events of it."""
        events = []
        for delta in self._deltas(0, text, is_last):
            kind: BlockKind
            if isinstance(delta, ToolCallDelta):
                kind, piece, call_id, name = "call", delta.arguments, delta.call_id, delta.name
            else:
                kind, piece = ("text", delta) if isinstance(delta, str) else ("reasoning", delta.text)
                call_id = name = ""
            if not self._blocks or kind != self._blocks[-1].kind or call_id:
                self._blocks.append(Block(kind, len(self._blocks), secrets.token_hex(12), call_id, name))
                events += self._ended_events(self._blocks[-2]) if len(self._blocks) > 1 else []
                events += self._begun_events(self._blocks[-1])
            if piece:
                self._blocks[-1].pieces.append(piece)
                events.append(self._piece_event(self._blocks[-1], piece))
        if is_last and self._blocks:
            events += self._ended_events(self._blocks[-1])
        return events
