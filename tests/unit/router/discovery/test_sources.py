"""Sources of members: settings, DNS, files."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from followed_source import followed

from text_generation_router.discovery.dns import DnsSource
from text_generation_router.discovery.file import FileSource
from text_generation_router.discovery.parse import parse_source
from text_generation_router.discovery.source import known


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10.0.0.1", "'10.0.0.1' is not an address"),
        ("10.0.0.1:0", "is not an address"),
        ("::1:50", "is not an address"),
        ("a b:50", "is not an address"),
        ("dns://shards", "is not an address"),
        ("file://shards.yaml", "expected file:///path"),
        ("kubernetes://shards:50051", "expected kubernetes://namespace/service:port"),
        ("kubernetes://ns/shards/../x:50051", "expected kubernetes://namespace/service:port"),
        ("kubernetes://ns/shards:50051", "works in a pod only"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused_with_its_text(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ValueError, match=message):
        parse_source(text)


async def test_a_list_yields_all_its_addresses_once() -> None:
    async with followed(parse_source("10.0.0.1:5, [fd00::1]:6,unix:///tmp/shard, shard.svc:7,")) as record:
        await record.until("10.0.0.1:5", "[fd00::1]:6", "unix:///tmp/shard", "shard.svc:7")


async def test_an_empty_set_says_that_nothing_is_known() -> None:
    for text, members in (("", None), ("a:1", frozenset({"a:1"}))):
        assert await anext(known(parse_source(text))) == members


async def test_a_file_is_followed_through_every_way_of_replacing_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # As a ConfigMap is mounted: shards.yaml -> ..data/shards.yaml, ..data -> a folder; ..data is renamed over.
    for name, text in (("one", "- a:1\n- b:2\n"), ("two", "- c:3\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shards.yaml").write_text(text)
    (tmp_path / "..data").symlink_to("one")
    path = tmp_path / "shards.yaml"
    path.symlink_to("..data/shards.yaml")
    async with followed(FileSource(path, every_s=0.01)) as record:
        await record.until("a:1", "b:2")
        (tmp_path / "..new").symlink_to("two")
        os.rename(tmp_path / "..new", tmp_path / "..data")
        await record.until("c:3")
        before = len(record.sets)
        (tmp_path / "..data").unlink()
        path.unlink()
        (tmp_path / "next").write_text("shards: {")
        os.rename(tmp_path / "next", path)
        (tmp_path / "next").write_text("- d:4\n- nonsense\n- {host: e}\n- 'unix:///tmp/f'\n")
        os.rename(tmp_path / "next", path)
        await record.until("d:4", "unix:///tmp/f")
        assert len(record.sets) == before + 1, "a file that cannot be read yields nothing"
        path.write_text("")
        await record.until()


async def test_a_name_is_looked_up_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[object] = [
        ["10.0.0.1", "fd00::1", "10.0.0.2"],
        socket.gaierror(socket.EAI_AGAIN, "try again"),
        socket.gaierror(socket.EAI_NONAME, "no such name"),
        ["fd00::1"],
    ]

    def getaddrinfo(name: str, port: int, *args: object, **options: object) -> list[tuple[object, ...]]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        assert name == "shards.ns.svc"
        assert isinstance(answer, list)
        return [(0, 0, 0, "", (host, port)) for host in answer]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    async with followed(DnsSource("shards.ns.svc", 50051, every_s=0.001)) as record:
        await record.until("[fd00::1]:50051")
    first = frozenset({"10.0.0.1:50051", "10.0.0.2:50051"})
    assert record.sets[:3] == [first, frozenset(), frozenset({"[fd00::1]:50051"})]
