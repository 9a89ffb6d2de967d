"""PrefixJobs: the jobs of requests that name none, by the longest prompt that they continue.

A session sends its prompt again, with more at its end. So a request belongs to the job of an earlier one of the same tenant whose
whole prompt its own begins with. Prompts that share less, as the instructions of an application, do not make a job: the rest of each
is compared, too.
"""

from collections import OrderedDict
from zlib import crc32

from text_generation_router.request import TenantId
from text_generation_router.scheduling.keys import TOKEN_BYTES
from text_generation_router.scheduling.sequence import ScheduledSequence

STRETCH_BYTES = 1024 * TOKEN_BYTES
"""Prompts are looked up at multiples of this; shorter ones belong to no job."""
BLOCK_BYTES = 16 * TOKEN_BYTES
"""The last tokens of a prompt that fill no block do not count: a template may end it otherwise in the next turn."""
MAX_PROMPTS = 4096

_Key = tuple[TenantId, str, int, int]
"""Tenant, salt, and the whole stretches of a prompt with their checksum. A collision only mixes jobs of a tenant."""


class PrefixJobs:
    """The last prompt of each job, the latest ones."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[_Key, tuple[int, int, str]] = OrderedDict()
        """The bytes of the prompt, the checksum of those after its stretches, and the job."""

    def name(self, sequence: ScheduledSequence) -> str:
        """Return the name of the job of a new sequence; "" for a short prompt."""
        prompt, tenant, salt = memoryview(sequence.prompt_key), sequence.request.qos.tenant, sequence.salt
        job, checksum = "", 0
        key: _Key | None = None
        for at in range(STRETCH_BYTES, len(prompt) + 1, STRETCH_BYTES):
            checksum = crc32(prompt[at - STRETCH_BYTES : at], checksum)
            key = tenant, salt, at, checksum
            if known := self._prompts.get(key):
                size, rest, name = known
                if size <= len(prompt) and crc32(prompt[at:size]) == rest:
                    job = name
        if key is None:
            return ""
        if not job or key not in self._prompts or self._prompts[key][2] != job:
            # The shorter prompt has more continuations.
            job = job or own_job(sequence)
            size = len(prompt) - len(prompt) % BLOCK_BYTES
            self._prompts[key] = size, crc32(prompt[key[2] : size]), job
        self._prompts.move_to_end(key)
        if len(self._prompts) > MAX_PROMPTS:
            self._prompts.popitem(last=False)
        return job


def own_job(sequence: ScheduledSequence) -> str:
    """Return the name of a job that a sequence begins. No name that a client gives contains NUL."""
    return f"\0{sequence.arrival}"
