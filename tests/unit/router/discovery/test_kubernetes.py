"""Members from the EndpointSlices of a service, against an API server with the faults of real ones."""

from __future__ import annotations

import ssl
from pathlib import Path

from certificates import write_certificates
from followed_source import followed
from http_stack import until
from kubernetes_api import FakeKubernetes, fake_kubernetes

from text_generation_router.discovery.kubernetes import KubernetesApi, KubernetesSource

MANY = tuple(f"10.0.0.{number}:50051" for number in range(1, 33))


def source_of(fake: FakeKubernetes, relist_s: float = 60.0) -> KubernetesSource:
    return KubernetesSource("default", "shards", "50051", fake.api, relist_s)


async def test_members_follow_the_service_through_faults_of_the_api_server(tmp_path: Path) -> None:
    """The times are those of the product: after each fault the next change is seen within 2 s."""
    async with fake_kubernetes(tmp_path) as fake, followed(source_of(fake)) as record:
        await record.until(seconds=2)
        fake.serve(MANY)
        await record.until(*MANY, seconds=2)
        fake.serve(MANY[:1], service="others")
        fake.serve(MANY, ready=False)
        assert record.sets[-1] == frozenset(MANY), "readiness is not read"
        fake.serve(MANY[:1])
        await record.until(*MANY[:1], seconds=2)
        # Deleted and added while the watch is down.
        fake.down = True
        fake.drop_watches()
        await until(lambda: fake.counts["503"] > 0)
        fake.serve(MANY[1:3])
        fake.down = False
        await record.until(*MANY[1:3], seconds=2)
        # The versions since the last list are gone.
        fake.serve(MANY[1:4])
        fake.compact()
        fake.drop_watches()
        await record.until(*MANY[1:4], seconds=2)
        # The token is replaced.
        fake.token = "second"
        fake.drop_watches()
        await until(lambda: fake.counts["401"] > 0)
        fake.serve(MANY[:2])
        fake.api.token_file.write_text("second\n")
        await record.until(*MANY[:2], seconds=2)
        fake.serve([])
        await record.until(seconds=2)


async def test_a_watch_that_is_too_old_or_goes_silent_is_replaced_by_a_list(tmp_path: Path) -> None:
    async with fake_kubernetes(tmp_path) as fake, followed(source_of(fake, relist_s=0.3)) as record:
        fake.serve(MANY[:1])
        await record.until(*MANY[:1])
        fake.silent = True
        await until(lambda: fake.counts["watch"] > 1)
        fake.serve(MANY[:2])
        await record.until(*MANY[:2])
        fake.compact()
        fake.serve(MANY[:3])
        await until(lambda: fake.counts["410"] > 0)
        await record.until(*MANY[:3])


async def test_only_the_cluster_s_own_authority_is_trusted(tmp_path: Path) -> None:
    ours, others = tmp_path / "ours", tmp_path / "others"
    for folder in (ours, others):
        write_certificates(folder, name="localhost,IP:127.0.0.1")
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(ours / "cert.pem", ours / "key.pem")
    async with fake_kubernetes(ours, server) as fake:
        fake.serve(MANY[:1])
        wrong = KubernetesApi(fake.api.url, fake.api.token_file, others / "ca.pem")
        async with (
            followed(source_of(fake)) as record,
            followed(KubernetesSource("default", "shards", "50051", wrong)) as deceived,
        ):
            await record.until(*MANY[:1])
            assert not deceived.sets
        assert fake.counts["list"] == 1
