"""The composition root of the router, for each role of a process.

one_process   all of it                        http + shards
scheduler     the scheduler process            shards, and a link to each HTTP worker
worker        an HTTP worker                   http, and a link to the scheduler process
"""

from text_generation_common.exit_codes import CannotServe, ExitCode
from text_generation_router.config import RouterConfig


async def serve(config: RouterConfig) -> ExitCode:
    """Serve until a stop signal. Raises CannotServe."""
    if config.role != "all" and not config.worker_socket:
        raise CannotServe("--role needs --worker-socket, the Unix socket of the scheduler process")
    # A role loads only what it needs: the scheduler process serves no HTTP and knows no text.
    if config.role == "scheduler":
        from text_generation_router.serve.scheduler import serve_workers

        return await serve_workers(config)
    if config.role == "http":
        from text_generation_router.serve.worker import serve_as_worker

        return await serve_as_worker(config)
    from text_generation_router.serve.one_process import serve_alone

    return await serve_alone(config)
