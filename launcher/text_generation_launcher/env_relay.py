"""The program of rank 0 under `trtllm-llmapi-launch`: send its environment to the process that started mpirun, then wait.

The script passes the address and key of the ranks to its program in the environment. The shard needs them but is not a
child of mpirun (mpi.py gives the reasons). The relay exits with 0 when the connection is closed, and the script then
ends the ranks in order.

It imports only the standard library, because it starts while a model loads.
"""

import json
import os
import socket

VARIABLE = "TEXT_GENERATION_HANDOVER"
"""Environment variable with the name of the abstract unix socket that receives the environment."""


def main() -> None:
    """Send the environment and wait for the end of the connection."""
    name = os.environ.pop(VARIABLE)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{name}")
        connection.sendall(json.dumps(dict(os.environ)).encode())
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # the peer never writes: this returns when it closes the connection


if __name__ == "__main__":
    main()
