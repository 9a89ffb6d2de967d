"""Audits of the whole server."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import aiohttp
import pytest
from full_grid import full
from stack import running

pytestmark = pytest.mark.system
FLAGS = ("--audit-share", "1", "--audit-busy", "1")
ANSWERS = 12


@pytest.mark.parametrize("workers", [full("1"), "2"])
async def test_requests_of_a_server_are_audited(echo_model: Path, workers: str) -> None:
    with running(echo_model, *FLAGS, "--http-workers", workers, "--num-replicas", "2") as stack:
        async with aiohttp.ClientSession(stack.url) as client:
            for number in range(ANSWERS):
                parameters = {"max_new_tokens": 20, "stop": ["never"] if number % 2 else ["hills"]}
                body = {"inputs": f"Tell me {number} things about the hills and the sea", "parameters": parameters}
                async with client.post("/generate", json=body) as response:
                    assert response.status == 200
                    assert "details" not in await response.json()
            async with asyncio.timeout(30):
                while True:
                    async with client.get("/metrics") as response:
                        text = await response.text()
                    found = dict(re.findall(r"^text_generation_audits_total\{verdict=\"(\w+)\"\} (\S+)$", text, re.M))
                    if float(found["same"]) == ANSWERS:
                        break
                    await asyncio.sleep(0.05)
            assert {name for name, count in found.items() if float(count)} == {"same"}
            async with client.get("/info") as response:
                assert (await response.json())["isolated"] == []
