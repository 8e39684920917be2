"""Types of the OpenAI routes' requests. Strict: a wrong type, an unknown field or a value out of range is refused, by name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from liveweight.engine.serving.requests import MAX_LOGPROBS, LogprobsMode
from liveweight.server.field_types import Content, Prompts, Stops, Text, Variables, wrong
from liveweight.server.openai import ignored_fields
from liveweight.spec.version_demand import VersionDemand

MAX_CHOICES = 1024
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Strict(BaseModel):
    """A JSON object of which every field is known. Fields in `IGNORED` are accepted at their neutral value, and ignored."""

    model_config = _STRICT
    IGNORED: ClassVar[ignored_fields.IgnoredFields] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_ignored(cls, data: Any) -> Any:
        return ignored_fields.without_ignored(data, cls.IGNORED)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core_schema))
        ignored_fields.add_to_schema(schema, cls.IGNORED)
        return schema


class StreamOptions(Strict):
    """Of a streamed answer: whether a last chunk tells the tokens that were used."""

    include_usage: bool | None = None


class WeightVersionDemand(Strict):
    """What the version that answers must be: of this number or a higher one (`min`), of this label (`exact`), of this run."""

    min: Annotated[int, Field(ge=0)] | None = None
    exact: Annotated[int, Field(ge=-(2**63), lt=2**63)] | Text | None = None
    run: Text | None = None

    @model_validator(mode="after")
    def _demands_something(self) -> Self:
        if self.min is None and self.exact is None:
            raise wrong("`min` or `exact` must be given")
        return self


class GenerateRequest(Strict):
    """What both routes have. `null` is the same as leaving a field out."""

    model: Text | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    logprobs_mode: LogprobsMode | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    weight_version: WeightVersionDemand | None = None
    user: Text | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise wrong("only with stream", param="stream_options")
        return self

    @property
    def demand(self) -> VersionDemand | None:
        """What the version that answers must be."""
        given = self.weight_version
        return None if given is None else VersionDemand(min=given.min, exact=given.exact, run=given.run)

    @property
    def choices(self) -> int:
        """Answers per prompt."""
        return 1 if self.n is None else self.n

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the tokens that were used."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(GenerateRequest):
    """`POST /v1/completions`."""

    IGNORED: ClassVar[ignored_fields.IgnoredFields] = ignored_fields.COMPLETION

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class Message(Strict):
    """One message of a conversation."""

    IGNORED: ClassVar[ignored_fields.IgnoredFields] = ignored_fields.MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Text | None = None
    reasoning_content: Text | None = None
    tool_call_id: Text | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise wrong(f"a message of {self.role} must have one", param="content")
        return self

    def plain(self) -> dict[str, Any]:
        """The message for a chat template: `developer` becomes `system`; absent fields are left out."""
        role = "system" if self.role == "developer" else self.role
        rest = self.model_dump(exclude={"role", "content"}, exclude_none=True)
        return {"role": role, "content": self.content or "", **rest}


class ChatRequest(GenerateRequest):
    """`POST /v1/chat/completions`."""

    IGNORED: ClassVar[ignored_fields.IgnoredFields] = ignored_fields.CHAT

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: Variables | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise wrong("only with logprobs", param="top_logprobs")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise wrong("differs from max_completion_tokens, which is its newer name", param="max_tokens")
        return self
