"""Rank 0's program under `trtllm-llmapi-launch`: hands its environment to who started mpirun, and waits for the end.

That environment is all that the script gives to the program it runs: where the ranks are to be reached, and the key for it. The
shard that is to have it is no child of mpirun's, for the reasons given in `under_mpirun`. It ends well when the connection
is closed: then the script ends the ranks in order.

Only the standard library: it starts beside a model that loads.
"""

from __future__ import annotations

import json
import os
import socket

VARIABLE = "TEXT_GENERATION_HANDOVER"
"""Name of the abstract unix socket on which the environment is awaited."""


def main() -> None:
    """Entry point."""
    name = os.environ.pop(VARIABLE)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{name}")
        connection.sendall(json.dumps(dict(os.environ)).encode())
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # nobody ever writes: this returns when the other end is closed


if __name__ == "__main__":
    main()
