"""Records of findings: the numbers of tokens and log-probabilities must agree."""

import os
from array import array
from pathlib import Path
from typing import Any

import orjson
import pytest
from shard_server import serve_engine

from text_generation_common.exit_codes import CannotServe
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.audit.records import make_folder, read_record, record_of, replay_record
from text_generation_router.audit.served import Served
from text_generation_router.audit.verdict import Judgement, Verdict
from text_generation_router.request import Request, RequestId
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines.echo import EchoEngine

PROMPT = tuple(range(20))


def written(path: Path, scored: int = 2) -> dict[str, Any]:
    """Write the record of a finding whose replay scored so many of two tokens."""
    served = Served(Request(RequestId(3), PROMPT, 4))
    served.tokens, served.logprobs = array("I", (8, 9)), array("f", (-0.5, -0.25))
    info = pb.InfoResponse(engine="echo", max_sequence_length=100)
    scores = pb.TokenScores(logprobs=[-1.0] * scored)
    path.write_bytes(record_of(served, Judgement(Verdict.DIFFERENT), scores, info, "none"))
    record: dict[str, Any] = orjson.loads(path.read_bytes())
    return record


def test_a_record_whose_replay_would_score_other_tokens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    record = written(path)
    order, logprobs = read_record(path)
    assert (list(order.prompt), order.generated_tokens, logprobs) == ([*PROMPT, 8, 9], 2, [-0.5, -0.25])
    for wrong in (
        record | {"served_logprobs": [-0.5]},
        record | {"order": record["order"] | {"logprobs": {"prompt": True}}},
    ):
        path.write_bytes(orjson.dumps(wrong))
        with pytest.raises(CannotServe, match="its order scores no generated tokens"):
            read_record(path)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    make_folder(str(tmp_path / "new" / "records"))
    assert [*(tmp_path / "new" / "records").iterdir()] == []
    (tmp_path / "file").touch()
    with pytest.raises(CannotServe, match=r"--audit-folder .*/file/records: Not a directory"):
        make_folder(str(tmp_path / "file" / "records"))


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    record = written(path)
    wrongs: list[object] = [[], record | {"order": None}, record | {"served_logprobs": {"0": 0, "1": 0}}]
    for wrong in wrongs:
        path.write_bytes(orjson.dumps(wrong))
        with pytest.raises(CannotServe, match="it has no order, or no list served_logprobs"):
            read_record(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CannotServe, match="it is not a file"):
        read_record(tmp_path / "pipe")


def test_a_record_has_no_token_that_its_replay_did_not_score(tmp_path: Path) -> None:
    written(tmp_path / "record.json", 1)
    order, logprobs = read_record(tmp_path / "record.json")
    assert (list(order.prompt), order.generated_tokens, logprobs) == ([*PROMPT, 8], 1, [-0.5])


@pytest.mark.parametrize(
    ("options", "room"),
    [({"echo_max_sequence_length": 22}, "a context of 22"), ({"echo_blocks": 1}, "a KV cache of 16")],
)
async def test_a_record_that_is_too_long_for_a_server_is_refused(
    tmp_path: Path, options: dict[str, int], room: str
) -> None:
    written(tmp_path / "record.json")
    order, logprobs = read_record(tmp_path / "record.json")
    engine = EchoEngine.build(ShardConfig(engine="echo", **options))  # type: ignore[arg-type]
    async with serve_engine(engine, f"unix://{tmp_path}/shard") as shard:
        with pytest.raises(CannotServe, match=f"the record is too long: 22 tokens and one more do not fit in {room}$"):
            await replay_record(order, logprobs, shard.client)
