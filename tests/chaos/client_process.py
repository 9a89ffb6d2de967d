"""A client as a process of its own, so that it can be stopped, killed or slowed down: python client_process.py PORT PHASE.

It keeps four connections open, each with a stream unless PHASE is `idle`, and reads what arrives. SIGUSR1 resets them all.
"""

from __future__ import annotations

import json
import select
import signal
import socket
import struct
import sys

from traffic import long_prompt

CONNECTIONS = 4


def connect(port: int, phase: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    if phase != "idle":
        inputs = long_prompt() if phase == "prefill" else "one two three four five"
        body = json.dumps({"inputs": inputs, "parameters": {"max_new_tokens": 6000}}).encode()
        head = "POST /generate_stream HTTP/1.1\r\nHost: chaos\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def reset(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    connections.clear()


def main() -> None:
    port, phase = int(sys.argv[1]), sys.argv[2]
    connections = [connect(port, phase) for _ in range(CONNECTIONS)]

    asked: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: asked.append(number))
    print("connected", flush=True)
    while True:
        if asked:
            reset(connections)
            asked.clear()
        readable, _, _ = select.select(connections, (), (), 0.1)
        for connection in readable:
            try:
                if connection.recv(1 << 16):
                    continue
            except OSError:
                pass
            connections.remove(connection)
            connection.close()


if __name__ == "__main__":
    main()
