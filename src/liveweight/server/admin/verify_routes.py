"""`POST /v1/weights/verify`: whether what all ranks hold now is what it should be. Parse, call, render.

The ranks digest their weights in the background; the leader compares (engine/updates/verifying).
"""

from __future__ import annotations

from typing import Annotated, NotRequired, Self

from fastapi import APIRouter, Request
from pydantic import AfterValidator, Field, WithJsonSchema, model_validator
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from liveweight.engine.updates.verifying import Against, VerificationRequest, VerificationResult
from liveweight.errors import ManifestInvalid, ManifestMismatch
from liveweight.server.admin.route import (
    CONFLICT,
    INVALID,
    LATE,
    TIMEOUT_S,
    ControlRoute,
    Timeout,
    error_responses,
    version_answer,
)
from liveweight.server.admin.update_routes import Label
from liveweight.server.errors import BadControl
from liveweight.server.field_types import Text, wrong
from liveweight.server.openai.request_types import Strict
from liveweight.server.response_types import VersionAnswer
from liveweight.server.route_context import route_context_of
from liveweight.spec.dtype import DType
from liveweight.spec.manifest import Manifest, TensorSpec, Version

MAX_TENSORS = 200_000
MAX_NAME = 1000
DTYPES = [dtype.value for dtype in DType]
Name = Annotated[Text, Field(min_length=1, max_length=MAX_NAME)]
Size = Annotated[int, Field(ge=0, lt=2**48)]


def _known_dtype(value: str) -> str:
    if value not in DTYPES:
        raise wrong(f"must be one of {', '.join(DTYPES)}")
    return value


DTypeName = Annotated[str, AfterValidator(_known_dtype), WithJsonSchema({"type": "string", "enum": DTYPES})]


class TensorField(Strict):
    """What a tensor should be."""

    dtype: DTypeName
    shape: Annotated[list[Size], Field(max_length=16)]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class VerifyRequest(Strict):
    """`POST /v1/weights/verify`. Without a manifest, against what is installed; without names, all tensors that are compared."""

    against: Against | None = None
    names: Annotated[list[Name], Field(min_length=1, max_length=MAX_TENSORS)] | None = None
    manifest: Annotated[dict[Name, TensorField], Field(min_length=1, max_length=MAX_TENSORS)] | None = None
    version: Label | None = None
    digests: bool | None = None
    timeout_s: Timeout | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if (self.wanted == "manifest") != (self.manifest is not None):
            raise wrong("goes with against: manifest, and only with it", param="manifest")
        if self.version is not None and self.wanted != "source":
            raise wrong("only with against: source", param="version")
        return self

    @property
    def wanted(self) -> Against:
        """What is compared with."""
        if self.against is None:
            return "installed" if self.manifest is None else "manifest"
        return self.against


class MismatchAnswer(TypedDict):
    """A tensor that differs, and the ranks whose part of it does, where that can be told."""

    name: str
    ranks: list[int]


class RankSecondsAnswer(TypedDict):
    """How long a rank took to digest what it holds."""

    rank: int
    seconds: float


class TensorAnswer(TypedDict):
    """A tensor as it lies in the ranks' memory. `digest` null: ranks that should hold the same hold different copies."""

    name: str
    aliases: list[str]
    dtype: str
    shape: list[int]
    digest: str | None


class VerifyAnswer(TypedDict):
    """`/v1/weights/verify`. `version` is the installed version, `found` the version whose content was found."""

    match: bool | None
    against: Against
    compared_with: VersionAnswer | None
    version: VersionAnswer | None
    found: VersionAnswer | None
    digest: str | None
    tensors: int
    compared: int
    differing: int
    mismatches: list[MismatchAnswer]
    ranks: list[RankSecondsAnswer]
    digests: NotRequired[list[TensorAnswer]]


router = APIRouter(tags=["control"], route_class=ControlRoute)


@router.post(
    "/v1/weights/verify", response_model=VerifyAnswer, responses=error_responses(CONFLICT, INVALID, LATE)
)
async def verify(request: Request, body: VerifyRequest | None = None) -> VerifyAnswer:
    """Digest what all ranks hold now, and compare it."""
    context, wanted = route_context_of(request), _verification_request(body or VerifyRequest())
    try:
        result = await context.run_in_thread(lambda: context.engine.verify(wanted))
    except (ManifestMismatch, ManifestInvalid) as error:
        if wanted.against == "source" and wanted.names is None:
            raise  # the source's fault, not the caller's
        param = "names" if wanted.manifest is None else "manifest"
        raise BadControl(str(error), param=param, code=error.code) from error
    return _answer(wanted.against, result)


def _verification_request(body: VerifyRequest) -> VerificationRequest:
    return VerificationRequest(
        against=body.wanted,
        names=None if body.names is None else tuple(body.names),
        manifest=None if body.manifest is None else _manifest(body.manifest),
        version=body.version,
        listed=bool(body.digests),
        timeout_s=TIMEOUT_S if body.timeout_s is None else body.timeout_s,
    )


def _manifest(given: dict[str, TensorField]) -> Manifest:
    return Manifest(
        tensors=tuple(
            TensorSpec(name=name, dtype=DType(field.dtype), shape=tuple(field.shape), digest=field.digest)
            for name, field in given.items()
        )
    )


def _answer(against: Against, result: VerificationResult) -> VerifyAnswer:
    verdict = result.verdict
    answer: VerifyAnswer = {
        "match": verdict.match,
        "against": against,
        "compared_with": _version(result.compared_with),
        "version": _version(verdict.serving),
        "found": _version(verdict.found),
        "digest": verdict.digest,
        "tensors": verdict.tensors,
        "compared": verdict.compared,
        "differing": verdict.differing,
        "mismatches": [{"name": one.name, "ranks": list(one.ranks)} for one in verdict.mismatches],
        "ranks": [{"rank": rank, "seconds": seconds} for rank, seconds in enumerate(verdict.seconds)],
    }
    if verdict.manifest is not None:
        answer["digests"] = [_tensor(spec) for spec in verdict.manifest]
    return answer


def _tensor(spec: TensorSpec) -> TensorAnswer:
    return {
        "name": spec.name,
        "aliases": list(spec.aliases),
        "dtype": spec.dtype.value,
        "shape": list(spec.shape),
        "digest": spec.digest,
    }


def _version(version: Version | None) -> VersionAnswer | None:
    return None if version is None else version_answer(version)
