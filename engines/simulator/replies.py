"""What does an engine answer? Bodies and stream events in the shapes of vLLM 0.32 and SGLang 0.5."""

from __future__ import annotations

from typing import Any

import msgspec

from engines.simulator.requests import Ask, Shape
from engines.simulator.scheduler import Token
from engines.simulator.sequences import Spoken
from engines.simulator.words import Words
from engines.types import EngineKind

DONE = b"data: [DONE]\n\n"
_ENCODER = msgspec.json.Encoder()


def failure(kind: EngineKind, message: str, status: int = 500) -> bytes:
    """How a stream ends in an error."""
    if kind is EngineKind.SGLANG:
        names = {500: "INTERNAL_SERVER_ERROR", 400: "BAD_REQUEST"}
        error = {"object": "error", "message": message, "type": names[status], "param": None, "code": status}
    else:
        error = {"message": message, "type": "InternalServerError", "param": None, "code": status}
    return event({"error": error}) + DONE


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _ENCODER.encode(body) + b"\n\n"


class Head(msgspec.Struct, frozen=True):
    """What an answer says beside the text: its id, when it was made, and in whose manner."""

    id: str
    created: int
    kind: EngineKind
    details: bool
    """Whether usage tells the cached tokens."""


class Reply:
    """The answer to one request, whole or in pieces."""

    def __init__(self, ask: Ask, sequences: list[Spoken], words: Words, head: Head) -> None:
        self._ask = ask
        self._sequences = sequences
        self._texts = words.texts
        self._kind = head.kind
        self._details = head.details
        self._said = [""] * len(sequences)
        self._streamed = [0] * len(sequences)
        self._head: dict[str, Any] = {
            "id": head.id,
            "object": {Shape.CHAT: "chat.completion", Shape.COMPLETION: "text_completion"}.get(ask.shape, ""),
            "created": head.created,
            "model": ask.model,
        }

    def opening(self) -> bytes:
        """What a stream says before its first token: for chat, whose turn it is."""
        if self._ask.shape is not Shape.CHAT:
            return b""
        chunks = []
        for index in range(len(self._sequences)):
            choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            body = self._chunk([choice])
            if self._kind is EngineKind.VLLM:
                body |= {"prompt_token_ids": self._ask.prompts[0] if self._ask.return_token_ids else None, "prompt_text": None}
            chunks.append(event(body))
        return b"".join(chunks)

    def piece(self, token: Token) -> bytes:
        """One token of a stream."""
        self._streamed[token.index] += 1
        if self._ask.shape is Shape.GENERATE:
            self._said[token.index] += self._texts[token.id]
            return event(self._generated(token.index, self._said[token.index], token if token.last else None))
        text = self._texts[token.id]
        choice: dict[str, Any] = {"index": token.index}
        if self._ask.shape is Shape.CHAT:
            choice["delta"] = {"content": text}
        else:
            choice["text"] = text
        choice["logprobs"] = None
        choice["finish_reason"] = self._sequences[token.index].prompt.ending if token.last else None
        if token.last or (self._ask.shape is Shape.COMPLETION and self._kind is EngineKind.VLLM):
            choice["stop_reason"] = None
        choice |= self._ids_of(token)
        return event(self._chunk([choice]))

    def closing(self) -> bytes:
        """The end of a stream: usage where asked for, and the mark that nothing follows."""
        if not self._ask.include_usage:
            return DONE
        body = self._chunk([])
        body["usage"] = self._usage(sum(self._streamed))
        return event(body) + DONE

    def whole(self, transfer: dict[str, Any] | None = None) -> bytes:
        """The body of an answer that is not streamed; every sequence has ended. `transfer` is what vLLM tells a decode engine."""
        if self._ask.shape is Shape.GENERATE:
            answers = [self._generated(index, self._text(index), sequence) for index, sequence in enumerate(self._sequences)]
            return _ENCODER.encode(answers if self._ask.batched else answers[0])
        body = dict(self._head)
        body["choices"] = [self._choice(index, sequence) for index, sequence in enumerate(self._sequences)]
        body["usage"] = self._usage(sum(sequence.generated for sequence in self._sequences))
        if self._ask.shape is Shape.CHAT and self._kind is EngineKind.VLLM:
            body["prompt_token_ids"] = self._ask.prompts[0] if self._ask.return_token_ids else None
        if self._kind is EngineKind.VLLM:
            body["kv_transfer_params"] = transfer
        return _ENCODER.encode(body)

    def _choice(self, index: int, sequence: Spoken) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index}
        if self._ask.shape is Shape.CHAT:
            choice["message"] = {"role": "assistant", "content": self._text(index), "refusal": None}
        else:
            choice["text"] = self._text(index)
        choice |= {"logprobs": None, "finish_reason": sequence.prompt.ending, "stop_reason": None}
        if self._ask.return_token_ids:
            choice["token_ids"] = self._ids(index)
            if self._ask.shape is Shape.COMPLETION or self._kind is EngineKind.SGLANG:
                choice["prompt_token_ids"] = sequence.prompt.tokens
        return choice

    def _ids_of(self, token: Token) -> dict[str, Any]:
        """The ids in a token's event. Where there are none to tell, vLLM says null, and SGLang nothing."""
        told = self._ask.return_token_ids
        ids: dict[str, Any] = {"token_ids": [token.id] if told else None}
        if self._ask.shape is Shape.COMPLETION:
            first = told and self._streamed[token.index] == 1
            prompt = {"prompt_token_ids": self._sequences[token.index].prompt.tokens if first else None}
            ids = prompt | ids if self._kind is EngineKind.VLLM else ids | prompt
        return ids if self._kind is EngineKind.VLLM else {name: value for name, value in ids.items() if value is not None}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        body = dict(self._head)
        if self._ask.shape is Shape.CHAT:
            body["object"] = "chat.completion.chunk"
        body["choices"] = choices
        if self._ask.continuous_usage:
            body["usage"] = {**self._usage(sum(self._streamed)), "prompt_tokens_details": None}
        return body

    def _usage(self, generated: int) -> dict[str, Any]:
        firsts = self._sequences[:: self._ask.samples]
        prompt = sum(len(sequence.prompt.tokens) for sequence in firsts)
        cached = sum(sequence.cached for sequence in firsts)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + generated,
            "completion_tokens": generated,
            "prompt_tokens_details": {"cached_tokens": cached} if self._details else None,
        }

    def _generated(self, index: int, text: str, ended: Spoken | Token | None) -> dict[str, Any]:
        """One answer of SGLang's `/generate`."""
        sequence = self._sequences[index]
        reason = {"type": sequence.prompt.ending, "length": sequence.generated} if ended is not None else None
        return {
            "text": text,
            "output_ids": self._ids(index),
            "meta_info": {
                "id": self._head["id"],
                "finish_reason": reason,
                "prompt_tokens": len(sequence.prompt.tokens),
                "completion_tokens": sequence.generated,
                "cached_tokens": sequence.cached,
                "cached_tokens_details": {"device": sequence.cached, "host": 0},
                "dp_rank": 0,
            },
        }

    def _ids(self, index: int) -> list[int]:
        sequence = self._sequences[index]
        return sequence.tokens[len(sequence.prompt.tokens) :].tolist()

    def _text(self, index: int) -> str:
        return "".join(self._texts[token] for token in self._ids(index))
