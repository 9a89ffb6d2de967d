"""Entry of `text-generation-launcher`. A signal ends it at once, also while its modules are imported, which takes a second."""

import os
import signal
import sys


def main() -> None:
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(sig) is not signal.SIG_IGN:  # nohup ignores SIGHUP on purpose
            # Until the event loop takes over. An exception could be swallowed by the module that is being imported. An interrupted
            # check is not a success; a server that is stopped before it serves is one (ExitCode.STOPPED).
            signal.signal(sig, signal.SIG_DFL if sys.argv[1:2] == ["check"] else lambda _signal, _frame: os._exit(0))

    from text_generation_launcher.commands import run

    run()


if __name__ == "__main__":
    main()
