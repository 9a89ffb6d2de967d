"""Records of findings: the numbers of tokens and log-probabilities must agree."""

from array import array
from pathlib import Path

import orjson
import pytest

from text_generation_common.exit_codes import CannotServe
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.audit.records import read_record, record_of
from text_generation_router.audit.served import Served
from text_generation_router.audit.verdict import Judgement, Verdict
from text_generation_router.request import Request, RequestId


def test_a_record_whose_replay_would_score_other_tokens_is_refused(tmp_path: Path) -> None:
    served = Served(Request(RequestId(3), (5, 6, 7), 4))
    served.tokens, served.logprobs = array("I", (8, 9)), array("f", (-0.5, -0.25))
    info = pb.InfoResponse(engine="echo", max_sequence_length=100)
    record = orjson.loads(record_of(served, Judgement(Verdict.DIFFERENT), pb.TokenScores(), info, "none"))
    path = tmp_path / "record.json"
    path.write_bytes(orjson.dumps(record))
    order, logprobs = read_record(path)
    assert (list(order.prompt), order.generated_tokens, logprobs) == ([5, 6, 7, 8, 9], 2, [-0.5, -0.25])
    for wrong in (
        record | {"served_logprobs": [-0.5]},
        record | {"order": record["order"] | {"logprobs": {"prompt": True}}},
    ):
        path.write_bytes(orjson.dumps(wrong))
        with pytest.raises(CannotServe, match="its order scores no generated tokens"):
            read_record(path)
