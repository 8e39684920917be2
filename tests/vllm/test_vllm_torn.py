"""The end of a server, and so the last of these tests: an install fails, and so does installing the version before."""

from __future__ import annotations

import pytest

import liveweight as lw
from liveweight.errors import LiveWeightError, RoundFailed, Torn
from tests.vllm.models import llama
from tests.vllm.serving import WITHIN_S, Answer, Server

pytestmark = pytest.mark.timeout(1200)


def publisher(server: Server) -> lw.Publisher:
    return lw.Publisher(llama(0), engines=[lw.vllm(server.url)], secret=server.secret, timeout_s=WITHIN_S)


def test_where_the_way_back_fails_too_vllm_stays_paused_and_says_so(spare: Server, fresh: Answer) -> None:
    assert spare.answer() == fresh
    spare.tell_workers("fail_loading", "7", "2")
    with publisher(spare) as trainer:
        with pytest.raises(RoundFailed, match="stays paused") as failed:
            trainer.publish("torn")
        assert failed.value.code == Torn.code
        assert spare.get("/is_paused") == {"is_paused": True}
        with pytest.raises(RoundFailed):
            trainer.publish("after")
    with pytest.raises(LiveWeightError), publisher(spare):
        pass
    assert spare.get("/is_paused") == {"is_paused": True}
