"""Types of the routes' responses, for the OpenAPI schema. openai/choices and openai/replies write the OpenAI responses."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from liveweight.engine.serving.requests import LogprobsMode


class Problem(TypedDict):
    """What went wrong. `param` is the field at fault, `code` a word or an LW code that stays the same.

    `offered` is what a source has in place of the version that was asked for. `demanded` is what a request wanted of the
    version that answers it, and `serving` the version that serves instead.
    """

    message: str
    type: str
    param: str | None
    code: str | None
    offered: NotRequired[list[str]]
    demanded: NotRequired[DemandAnswer]
    serving: NotRequired[VersionAnswer | None]


class DemandAnswer(TypedDict, total=False):
    """The fields of a demand that were given."""

    min: int
    exact: str | int
    run: str


class Error(TypedDict):
    """Every answer that is no success."""

    error: Problem


class CachedTokens(TypedDict):
    """Tokens of prompts that the prefix cache had."""

    cached_tokens: int


class UsageAnswer(TypedDict):
    """Tokens that were used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class WeightVersion(TypedDict):
    """Weights by their label, the digest of their content, and their number in their run. What the engine was started on is `initial`,
    without a number."""

    label: str
    digest: str
    number: int | None


WeightSpan = TypedDict("WeightSpan", {"from": int, "weight_version": WeightVersion})
WeightSpan.__doc__ = "From this token of the choice on, its tokens came from these weights."


class RoutedExperts(TypedDict):
    """The experts of every token that went through the model: little-endian, row-major, base64."""

    data: str
    shape: list[int]
    dtype: Literal["uint16"]


class ChoiceAnswer(TypedDict):
    """What choices of both routes have."""

    index: int
    finish_reason: Literal["stop", "length", "abort"] | None
    weight_version: WeightVersion | None
    weight_spans: NotRequired[list[WeightSpan]]
    kv: NotRequired[Literal["reused"]]
    token_ids: NotRequired[list[int]]
    routed_experts: NotRequired[RoutedExperts | None]


class CompletionLogprobsAnswer(TypedDict):
    """Lists side by side, an entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None]]
    text_offset: list[int]


class CompletionChoiceAnswer(ChoiceAnswer):
    """A choice of `/v1/completions`."""

    text: str
    logprobs: CompletionLogprobsAnswer | None
    prompt_token_ids: NotRequired[list[int]]


class ResponseEnvelope(TypedDict):
    """What answers of both routes have."""

    id: str
    created: int
    model: str
    usage: UsageAnswer


class CompletionAnswer(ResponseEnvelope):
    """`/v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoiceAnswer]


class ChatMessageAnswer(TypedDict):
    """What the model said."""

    role: Literal["assistant"]
    content: str


class ChatLogprobsAnswer(TypedDict):
    """An object per token: token, logprob, bytes, top_logprobs."""

    content: list[dict[str, Any]]
    refusal: None


class ChatChoiceAnswer(ChoiceAnswer):
    """A choice of `/v1/chat/completions`."""

    message: ChatMessageAnswer
    logprobs: ChatLogprobsAnswer | None


class ChatAnswer(ResponseEnvelope):
    """`/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoiceAnswer]
    prompt_token_ids: NotRequired[list[int]]


class ModelAnswer(TypedDict):
    """A model that is served here. `logprobs_mode` is for requests that name none."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    logprobs_mode: LogprobsMode


class ModelsAnswer(TypedDict):
    """`/v1/models`."""

    object: Literal["list"]
    data: list[ModelAnswer]


class HealthAnswer(TypedDict):
    """`/health`. `error` says why it is failed, torn, or waits for its weights; `weight_version` is then what it had."""

    status: Literal["ok", "asleep", "torn", "pending_weights", "stopping", "failed"]
    model: str
    tp: int
    running: int
    waiting: int
    kv_blocks_total: int
    kv_blocks_free: int
    weight_version: WeightVersion
    error: NotRequired[Problem]


class VersionAnswer(TypedDict):
    """A version: the trainer's run, a label in it, the digest of the content where it is known, and its number in the run; null for weights
    that no publisher numbered."""

    run: str
    label: str | int
    digest: str | None
    number: int | None


class RoundAnswer(TypedDict):
    """A round that ended. `stall_s` is how long decoding stopped for it; `reason`, why it failed; `draft`, whether it left the
    draft as it was."""

    version: str
    outcome: str
    took_s: float
    stall_s: float | None
    reason: str | None
    draft: Literal["kept"] | None


class SnapshotsAnswer(TypedDict):
    """The engine's snapshots. `newest` is the last that is complete, `writing` the one that is being written; `failed` says why the
    last one that was tried came to nothing."""

    directory: str
    every: int
    keep: int
    newest: VersionAnswer | None
    path: str | None
    writing: VersionAnswer | None
    failed: str | None


class RecoveryAnswer(TypedDict):
    """How the engine came back the last time, after so many restarts. `behind` is the version that it had, as long as it serves an older
    one; `notes` say what was tried before, and why that was not taken."""

    restarts: int
    version: VersionAnswer
    origin: Literal["snapshot", "offer", "publisher", "checkpoint"]
    behind: VersionAnswer | None
    notes: list[str]
    took_s: float


class WeightsAnswer(TypedDict):
    """`/v1/weights`. `undo` null: there is no version to go back to; `address` null: it takes no live updates; `snapshots` null: it
    keeps none; `recovery` null: it has not lost a rank. `serving_s` is for how long it has served the version; `pending` says why it
    takes no requests before a publisher has come; `asleep` lists what it released."""

    model: str
    tp: int
    state: str
    paused: Literal["running", "draining", "paused"]
    version: VersionAnswer | None
    undo: VersionAnswer | None
    round: str | None
    rounds: list[RoundAnswer]
    address: str | None
    source: str | None
    transfer_mode: str | None
    kv_policy: Literal["recompute", "reuse", "drop"] | None
    draft: Literal["current", "kept"] | None
    draft_weights: Literal["required", "keep"] | None
    snapshots: SnapshotsAnswer | None
    recovery: RecoveryAnswer | None
    serving_s: float
    pending: str | None
    asleep: list[str]


class PausedAnswer(TypedDict):
    """`/v1/pause`, `/v1/resume` and `/v1/is_paused`."""

    is_paused: bool
    state: Literal["running", "draining", "paused"]


class AbortedAnswer(TypedDict):
    """`/v1/abort_requests`: how many choices were ended, and the ids that no open request has."""

    aborted: int
    unknown: list[str]
