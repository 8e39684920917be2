"""Completions of one engine, for rollouts: what is asked, what the answer must be, and which problems are the engine's.

Owns the two dialects of `/v1/completions`, ours and vLLM's. Which engine is asked, and when again, is rollouts.py's.
"""

from __future__ import annotations

import http.client
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from liveweight.errors import KeyRefused, MessageInvalid, RequestInvalid, TrainerRefused
from liveweight.integrations.connect import Engine
from liveweight.integrations.vllm.client.http_controls import MIDDLEWARE
from liveweight.integrations.vllm.engine import VllmEngine
from liveweight.integrations.vllm.middleware import ADMITTED, FINISHED
from liveweight.server.client import PendingCall, is_url
from liveweight.spec.deadline import Deadline
from liveweight.spec.decoders import from_json
from liveweight.spec.manifest import Version

ROUTE = "/v1/completions"
PROCESSED = "processed_logprobs"
DESCRIBE_S = 10.0
"""How long an engine may take to describe its model."""
RETRY_S = 0.5
"""How soon a request is repeated if the engine does not say."""
_SHOWN = 400

Dialect = Literal["liveweight", "vllm"]
ProblemKind = Literal["lost", "other_version", "busy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAnswer:
    """The answers to one prompt: tokens, and the logprob of each under the distribution that it was drawn from."""

    completions: list[list[int]]
    logprobs: list[list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProblem:
    """Why an engine did not answer with the version that was published. The same prompt can be asked again, here or elsewhere.

    `lost`: it cannot be reached, or serves nothing. `other_version`: it serves other weights, or they changed within the answer. `busy`:
    its queue is full; it takes requests again after `retry_s`.
    """

    kind: ProblemKind
    reason: str
    retry_s: float = RETRY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What an engine says of its model. None where it does not say."""

    name: str
    context: int | None
    logprobs_mode: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFields:
    """How completions are drawn; the names are those of the request's fields."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    more: Mapping[str, Any]
    """Further fields, from TRL's `generation_kwargs`."""

    @property
    def raw_is_processed(self) -> bool:
        """Whether tokens are drawn from the model's own distribution, so that its raw logprobs are those of the draw."""
        return (
            self.temperature == 1.0
            and self.top_p == 1.0
            and self.top_k <= 0
            and self.min_p == 0.0
            and self.repetition_penalty == 1.0
            and not {"frequency_penalty", "presence_penalty", "logit_bias", "min_tokens"} & set(self.more)
        )

    def body(self) -> dict[str, Any]:
        """The fields of a request."""
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            **self.more,
        }


class _WeightVersion(msgspec.Struct):
    label: str
    digest: str | None = None
    run: str | None = None


class _WeightSpan(msgspec.Struct):
    weight_version: _WeightVersion


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]


class _Choice(msgspec.Struct):
    index: int
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    weight_version: _WeightVersion | None = None
    weight_spans: list[_WeightSpan] | None = None
    kv: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    logprobs_mode: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class CompletionEndpoint:
    """One engine's completions. Methods are for any thread; every request is a connection of its own."""

    def __init__(self, url: str, *, key: str | None, dialect: Dialect) -> None:
        self.url, self.dialect, self._key = url.rstrip("/"), dialect, key
        self._parts = urlsplit(self.url)
        self._calls: set[PendingCall] = set()
        self._model: str | None = None

    @classmethod
    def of(cls, engine: Engine, api_key: str | None) -> CompletionEndpoint:
        """The endpoint of an engine that a user named. TrainerRefused unless it is named by its URL."""
        match engine:
            case str() if is_url(engine):
                return cls(engine, key=api_key, dialect="liveweight")
            case VllmEngine(given=str() as url) if is_url(url):
                return cls(url, key=engine.key or api_key, dialect="vllm")
        shown = engine if isinstance(engine, str) else f"a {type(engine).__name__}"
        raise TrainerRefused(
            f"rollouts are asked for over HTTP, and {shown} is no URL: "
            'give "http://host:port" of a liveweight engine, or lw.vllm("http://host:port")'
        )

    def describe(self) -> ServedModel | EngineProblem:
        """Ask for the model that it serves. Remembers the model's name, which vLLM wants in requests."""
        found = self._call("GET", "/v1/models", None, Deadline.after(DESCRIBE_S))
        if isinstance(found, EngineProblem):
            return found
        status, raw, _ = found
        if status != 200:
            return self._problem(status, raw, RETRY_S)
        try:
            model = from_json(raw, _Models).data[0]
        except (msgspec.DecodeError, IndexError) as error:
            raise MessageInvalid(
                f"{self.url} is no engine: its /v1/models cannot be read: {error}"
            ) from error
        self._model = model.id
        mode = model.logprobs_mode
        if self.dialect == "vllm" and mode is None:
            mode = self._server_mode()
        return ServedModel(name=model.id, context=model.max_model_len, logprobs_mode=mode)

    def try_out(self, sampling: SamplingFields, count: int, token: int) -> EngineProblem | None:
        """Ask for `count` answers of one token with these settings, whatever version answers. None if it takes such requests; else why it
        takes none at present. Raises if it refuses them."""
        body = {
            **self._body([token], count, sampling),
            "max_tokens": max(1, sampling.more.get("min_tokens", 0)),
        }
        found = self._call("POST", ROUTE, body, Deadline.after(DESCRIBE_S))
        if isinstance(found, EngineProblem):
            return found
        status, raw, headers = found
        problem = None if status == 200 else self._problem(status, raw, _retry_s(headers))
        return problem if problem is not None and problem.kind == "lost" else None

    def complete(
        self,
        prompt: Sequence[int],
        count: int,
        sampling: SamplingFields,
        version: Version,
        deadline: Deadline,
    ) -> GroupAnswer | EngineProblem:
        """Ask for `count` answers to one prompt, all of that version. Raises for a request that no engine would take."""
        body = {**self._body(prompt, count, sampling), "weight_version": self._demand(version)}
        found = self._call("POST", ROUTE, body, deadline)
        if isinstance(found, EngineProblem):
            return found
        status, raw, headers = found
        if status != 200:
            return self._problem(status, raw, _retry_s(headers))
        return self._read(raw, headers, count, version)

    def interrupt(self) -> None:
        """End all waits for answers at once: they end as if the engine were lost."""
        for call in list(self._calls):
            call.interrupt()

    def _body(self, prompt: Sequence[int], count: int, sampling: SamplingFields) -> dict[str, Any]:
        body = {
            "prompt": list(prompt),
            "n": count,
            "logprobs": 0,
            "return_token_ids": True,
            **sampling.body(),
        }
        if self.dialect == "liveweight":
            return body | {"logprobs_mode": PROCESSED}
        return body if self._model is None else body | {"model": self._model}

    def _call(
        self, method: str, path: str, body: object, deadline: Deadline
    ) -> tuple[int, bytes, Mapping[str, str]] | EngineProblem:
        try:
            with closing(PendingCall(self._parts, method, path, self._key, body, deadline)) as call:
                self._calls.add(call)
                try:
                    status, raw = call.answer()
                finally:
                    self._calls.discard(call)
                if len(raw) < int(call.headers.get("content-length", 0)):
                    raise http.client.IncompleteRead(
                        raw
                    )  # the engine was killed: http.client itself is silent
                return status, raw, call.headers
        except TimeoutError:
            waited_s = deadline.waited_s()
            return EngineProblem(
                kind="lost", reason=f"{self.url} did not answer {method} {path} for {waited_s:.0f} s"
            )
        except OSError as error:
            return EngineProblem(
                kind="lost", reason=f"{self.url} cannot be reached: {error.strerror or error}"
            )
        except (http.client.HTTPException, ValueError) as error:
            return EngineProblem(
                kind="lost", reason=f"{self.url} broke off its answer: {error or type(error).__name__}"
            )

    def _demand(self, version: Version) -> dict[str, Any]:
        """An engine that serves another version refuses the request (409) before it takes it. vLLM itself knows only labels."""
        exact = {"exact": str(version.label)}
        return exact if self.dialect == "vllm" else exact | {"run": version.run}

    def _problem(self, status: int, raw: bytes, retry_s: float) -> EngineProblem:
        """What a status other than 200 means. Raises if the request itself is at fault: no engine would take it."""
        problem = _error_of(raw)
        text = str(problem.get("message") or raw.decode(errors="replace")[:_SHOWN])
        if status == 401:
            raise KeyRefused(f"{self.url} wants another key: {text}")
        if status == 409:
            return EngineProblem(
                kind="other_version", reason=f"{self.url} serves another version: {text}", retry_s=retry_s
            )
        if status == 429:
            return EngineProblem(kind="busy", reason=f"{self.url} is full: {text}", retry_s=retry_s)
        if status < 500:
            raise RequestInvalid(f"{self.url} refuses the request with status {status}: {text}")
        return EngineProblem(kind="lost", reason=f"{self.url} serves nothing now: {text}", retry_s=retry_s)

    def _read(
        self, raw: bytes, headers: Mapping[str, str], count: int, version: Version
    ) -> GroupAnswer | EngineProblem:
        try:
            choices = sorted(from_json(raw, _Completion).choices, key=lambda choice: choice.index)
        except msgspec.DecodeError as error:
            raise MessageInvalid(f"{self.url}: its answer cannot be read: {error}") from error
        if len(choices) != count:
            raise MessageInvalid(f"{self.url} gave {len(choices)} answers where {count} were asked for")
        other = self._other_version(choices, headers, version)
        if other is not None:
            reason = f"{self.url} answered with {other} instead of {version}"
            return EngineProblem(kind="other_version", reason=reason)
        completions: list[list[int]] = []
        logprobs: list[list[float]] = []
        for choice in choices:
            if not choice.token_ids or choice.finish_reason not in ("stop", "length"):
                return EngineProblem(
                    kind="lost", reason=f"{self.url} broke off an answer ({choice.finish_reason})"
                )
            found = [] if choice.logprobs is None else choice.logprobs.token_logprobs
            if len(found) != len(choice.token_ids):
                raise MessageInvalid(
                    f"{self.url} gave {len(found)} logprobs of {len(choice.token_ids)} tokens"
                )
            completions.append(choice.token_ids)
            logprobs.append([float("nan") if one is None else one for one in found])
        return GroupAnswer(completions=completions, logprobs=logprobs)

    def _other_version(
        self, choices: Sequence[_Choice], headers: Mapping[str, str], version: Version
    ) -> str | None:
        """What tokens came from, if not all came from that version alone; else None."""
        if self.dialect == "vllm":
            served = [headers.get(name.decode()) for name in (ADMITTED, FINISHED)]
            if None in served:
                raise TrainerRefused(f"{self.url} does not say which version answered: {_NO_MIDDLEWARE}")
            return next((label for label in served if label != str(version.label)), None)
        for choice in choices:
            spans = [span.weight_version for span in choice.weight_spans or ()]
            for found in (*spans, choice.weight_version):
                if found is None or not _is(found, version):
                    return "no version" if found is None else found.label
            if choice.kv is not None:
                return f"{version} over keys and values of another version"
        return None

    def _server_mode(self) -> str | None:
        """vLLM's `--logprobs-mode`, from its routes for RL."""
        found = self._call("GET", "/server_info?config_format=json", None, Deadline.after(DESCRIBE_S))
        if isinstance(found, EngineProblem) or found[0] != 200:
            return None
        try:
            info = from_json(found[1], dict[str, Any])
        except msgspec.DecodeError:
            return None
        tree = info.get("vllm_config", info)
        config = tree.get("model_config") if isinstance(tree, dict) else None
        mode = config.get("logprobs_mode") if isinstance(config, dict) else None
        return mode if isinstance(mode, str) else None


_NO_MIDDLEWARE = f"start vLLM with --middleware {MIDDLEWARE}"


def _is(found: _WeightVersion, version: Version) -> bool:
    """Whether an answer's version is that one: by its content where that is known, else by its names."""
    if found.label != str(version.label) or found.run not in (None, version.run):
        return False
    return not version.content_known or found.digest in (None, version.digest)


def _error_of(raw: bytes) -> dict[str, Any]:
    try:
        answer = from_json(raw, dict[str, Any])
    except msgspec.DecodeError:
        return {}
    problem = answer.get("error", answer)
    return problem if isinstance(problem, dict) else {}


def _retry_s(headers: Mapping[str, str]) -> float:
    try:
        return min(60.0, max(0.05, float(headers.get("retry-after", ""))))
    except ValueError:
        return RETRY_S
