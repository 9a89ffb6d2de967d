"""Who gets in, and as what: the places in the building, and the way from a text to a Request."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from text_generation_proto.values import Grammar, GrammarKind
from text_generation_router.api.core.extras import TGI, Extras, check_extras, check_token_ids
from text_generation_router.api.core.parameters import GenerateParameters
from text_generation_router.api.core.sampling import to_sampling
from text_generation_router.api.core.settings import Limits
from text_generation_router.api.core.supported import check_supported
from text_generation_router.api.core.validation import check_parameters, check_total, new_tokens
from text_generation_router.errors import InvalidRequest, Overloaded
from text_generation_router.grammar.compiler import GrammarCompiler
from text_generation_router.grammar.forms import tgi_grammar
from text_generation_router.metrics import Metrics
from text_generation_router.request import QualityOfService, Request, RequestId, TenantId, TokenId
from text_generation_router.text.tokenizer import Tokenizer, tokenizer_errors

COUNTED_EXACTLY = 1 << 16
"""A text of up to so many characters is always tokenized whole before it may be refused for its length."""
PROBE_CHARACTERS_PER_TOKEN = 2
"""First probe of a longer text, a token of the limit. Ideographs have less than one character a token and are slow to
tokenize; English prose has about four and is proven too long by the third probe."""
BOUNDARY_TOKENS = 64
"""A cut text may end in tokens that the whole text has not: so many at its end prove nothing."""


RetryAfter = Callable[[TenantId], float | None]
"""The wait foreseen for a tenant's next request, in seconds; None: nothing is known of it."""


def _unknown(tenant: TenantId) -> float | None:
    return None


class Permits:
    """The places in the building: `limit` generations at once, and nobody waits at the door.

    A tenant within its share, which is as many places as each would have if the `limit` were dealt evenly among those
    who hold some, is let in although others fill the building. So whoever comes late finds a place, and there are never
    more than twice `limit` generations.
    """

    def __init__(self, limit: int, retry_after: RetryAfter = _unknown) -> None:
        """`retry_after` is asked for what a refusal says."""
        self.limit = limit
        self.in_use = 0
        self._held: dict[TenantId, int] = {}
        """By tenants that hold at least one."""
        self._retry_after = retry_after

    @contextmanager
    def take(self, count: int, tenant: TenantId = TenantId("")) -> Iterator[None]:  # noqa: B008 - a text
        """Hold `count` places for as long as the block lasts. Raises Overloaded, InvalidRequest where there never are
        so many."""
        if count > self.limit:
            raise InvalidRequest(f"at most {self.limit} generations may be asked for at once. Given: {count}")
        if self.in_use + count > self.limit and not self._owed(count, tenant):
            raise Overloaded(retry_after_s=self._retry_after(tenant))
        self.in_use += count
        self._held[tenant] = self._held.get(tenant, 0) + count
        try:
            yield
        finally:
            self.in_use -= count
            self._held[tenant] -= count
            if not self._held[tenant]:
                del self._held[tenant]

    def _owed(self, count: int, tenant: TenantId) -> bool:
        """Whether `count` places more are within the tenant's share, and the building can be stretched to hold them."""
        tenants = len(self._held.keys() | {tenant})
        share = self.limit // tenants
        return self._held.get(tenant, 0) + count <= share and self.in_use + count <= 2 * self.limit


class RequestPreparer:
    """Validates, tokenizes, numbers."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: Limits,
        metrics: Metrics,
        grammars: GrammarCompiler | None = None,
        grammar_kinds: Collection[GrammarKind] = tuple(GrammarKind),
    ) -> None:
        """Without `grammars` none is supported; with them, those of `grammar_kinds`."""
        self._grammars = grammars
        self._grammar_kinds = () if grammars is None else grammar_kinds
        self._tokenizer = tokenizer
        self._limits = limits
        self._metrics = metrics
        self._ids = itertools.count(1)
        self._random = random.SystemRandom()

    def serves_grammar(self, kind: GrammarKind) -> bool:
        """Whether a request may have one of this kind."""
        return kind in self._grammar_kinds

    async def admit(
        self,
        inputs: str | Sequence[TokenId],
        parameters: GenerateParameters,
        extras: Extras = TGI,
        count: int = 1,
        qos: QualityOfService = QualityOfService(),
    ) -> Request:
        """The request a body asks for; `inputs` may be tokens already. `count` generations are to be made of it.

        Raises InvalidRequest, Overloaded.
        """
        check_parameters(inputs, parameters, self._limits)
        check_extras(extras, self._limits)
        prompt = await self._prompt(inputs, parameters, extras)
        max_new_tokens = new_tokens(len(prompt), parameters, self._limits)
        if extras.min_new_tokens > max_new_tokens:
            raise InvalidRequest(
                f"`min_tokens` must be <= `max_tokens`. Given: {extras.min_new_tokens} and {max_new_tokens}"
            )
        for _ in range(count):
            self._metrics.requests.input_length.observe(len(prompt))
        grammar = await self._grammar(parameters, extras)
        request = Request(
            id=self._next_id(),
            prompt=tuple(prompt),
            max_new_tokens=max_new_tokens,
            sampling=to_sampling(parameters, extras, self._random_seed()),
            stop_sequences=tuple(parameters.stop),
            keep_stop_text=extras.keep_stop_text,
            visible_special=extras.visible_special,
            stop_token_ids=extras.stop_token_ids,
            ignore_eos=extras.ignore_eos,
            min_new_tokens=extras.min_new_tokens,
            top_n_tokens=parameters.top_n_tokens or 0,
            prompt_logprobs=parameters.decoder_input_details,
            prompt_top_n=extras.prompt_top_n,
            grammar=grammar,
            qos=qos,
        )
        check_supported(request, self._limits.unsupported, extras.names)
        for _ in range(count):
            self._metrics.requests.max_new_tokens.observe(max_new_tokens)
        return request

    def another(self, request: Request, number: int) -> Request:
        """The same request once more, as a further sequence beside it: with a name and a seed of its own.

        The seed follows from the first one's, so that a client that gave one gets the same answers again.
        """
        return replace(request, id=self._next_id(), sampling=request.sampling.for_answer(number))

    def _random_seed(self) -> int | None:
        return None if "seed" in self._limits.unsupported else self._random.getrandbits(64)

    def _next_id(self) -> RequestId:
        return RequestId(next(self._ids))

    async def _grammar(self, parameters: GenerateParameters, extras: Extras) -> Grammar | None:
        """Rules 17 to 19. Raises InvalidRequest."""
        if parameters.grammar is None and extras.grammar is None:
            return None
        if self._grammars is None:
            raise InvalidRequest("grammar is not supported")
        grammar = extras.grammar if parameters.grammar is None else tgi_grammar(parameters.grammar)
        if grammar is None:
            return None
        if not self.serves_grammar(grammar.kind):
            raise InvalidRequest(f"grammar is not supported: this engine follows none of kind `{grammar.kind.value}`")
        await self._grammars.prove(grammar)
        return grammar

    async def _prompt(
        self, inputs: str | Sequence[TokenId], parameters: GenerateParameters, extras: Extras
    ) -> Sequence[TokenId]:
        if isinstance(inputs, str):
            if parameters.truncate is None:
                await self._refuse_if_plainly_too_long(inputs, parameters, extras)
            ids: Sequence[TokenId] = await self._encode(inputs, extras)
        else:
            check_token_ids("prompt", inputs, self._limits)
            ids = inputs
        if parameters.truncate is not None:
            ids = ids[-parameters.truncate :]
        if not ids:  # a tokenizer that drops the whole text and adds nothing
            raise InvalidRequest("`inputs` cannot be empty")
        return ids

    async def _refuse_if_plainly_too_long(self, inputs: str, parameters: GenerateParameters, extras: Extras) -> None:
        """Break rule 15 on a beginning of the text where that is enough to prove it. Raises InvalidRequest.

        Two megabytes take seconds to tokenize, and nearly all such texts are far past the limit: a beginning shows it
        in milliseconds. The message is TGI's, with a lower bound in place of the count. Each probe is twice as long as
        the last, so that a text that passes costs at most twice its tokenizing.
        """
        size = PROBE_CHARACTERS_PER_TOKEN * self._limits.max_total_tokens
        while COUNTED_EXACTLY < len(inputs) > size:
            at_least = max(len(await self._encode(inputs[:size], extras)) - BOUNDARY_TOKENS, 0)
            check_total(at_least, parameters, self._limits, given=f"at least {at_least}")
            size *= 2

    async def _encode(self, text: str, extras: Extras) -> list[TokenId]:
        with tokenizer_errors():
            return await self._tokenizer.encode_ids(text, add_special_tokens=extras.add_special_tokens)
