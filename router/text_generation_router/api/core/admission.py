"""Admission: the way from a prompt and its options to a Request."""

import random
import time
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from text_generation_proto.values import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, Grammar, GrammarKind
from text_generation_router.api.core.parameters import (
    INPUTS,
    GenerationOptions,
    check_options,
    check_supported,
    check_token_ids,
    check_total,
    new_tokens,
)
from text_generation_router.api.core.settings import Limits
from text_generation_router.chat.conversation import Conversation
from text_generation_router.errors import InvalidRequest, NotSupported
from text_generation_router.grammar.compiler import GrammarCompiler
from text_generation_router.grammar.forms import tgi_grammar
from text_generation_router.grammar.translate import TRANSLATED
from text_generation_router.media.reader import ImageReader
from text_generation_router.metrics import HttpMetrics
from text_generation_router.request import PlacedImage, QualityOfService, Request, RequestId, TenantId, TokenId
from text_generation_router.text.tokenizer_pool import TokenizerPool
from text_generation_router.web.body_errors import about

COUNTED_EXACTLY = 1 << 16
"""Texts of up to this number of characters are tokenized whole before they are refused for their length."""


@dataclass(frozen=True, slots=True)
class RequestPreparer:
    """Makes requests: validates options, tokenizes prompts, gives out ids and seeds."""

    tokenizer: TokenizerPool
    limits: Limits
    metrics: HttpMetrics
    ids: Iterator[RequestId]
    """The numbers of requests."""
    grammars: GrammarCompiler | None = None
    """None: no grammar is supported."""
    grammar_kinds: Collection[GrammarKind] = tuple(GrammarKind)
    """With `grammars`: the kinds that are supported."""
    images: ImageReader | None = None
    """None: the model takes none."""
    _random: random.Random = field(default_factory=random.Random)
    """Seeds are not secret: the system's random numbers cost a system call."""

    def serves_grammar(self, kind: GrammarKind) -> bool:
        return self.grammars is not None and kind in self.grammar_kinds

    async def prepare(
        self,
        inputs: str | Sequence[TokenId],
        options: GenerationOptions,
        qos: QualityOfService = QualityOfService(),
        count: int = 1,
        images: Sequence[str] = (),
    ) -> list[Request]:
        """Return `count` equal requests, each with its own id and seed. `inputs` may be token ids. `images` are the sources of its
        images, each with a place in `inputs`.

        The seeds follow from the first one, so that a client that sets it gets the same answers again.
        Raises InvalidRequest, Overloaded, CannotKeepUp, Unhealthy.
        """
        check_options(inputs, options, self.limits)
        began = time.monotonic()
        with about(INPUTS[options.api]):
            prompt, media = await self._prompt(inputs, options, qos, images, count)
        tokenized = began, time.monotonic()
        max_new_tokens = new_tokens(len(prompt), options, self.limits)
        for _ in range(count):
            self.metrics.requests.input_length.observe(len(prompt))
        with about(options.grammar_field):
            grammar = None if options.grammar is None else await self.proven(options.grammar, qos.tenant)
        options = await self.with_bad_words(options, qos.tenant)
        prediction: Sequence[TokenId] = ()
        if options.prediction and self.limits.drafts:
            prediction = await self._prediction(options.prediction, qos)
        sampling = options.sampling
        if sampling.seed is None and "seed" not in self.limits.unsupported:
            sampling = replace(sampling, seed=self._random.getrandbits(63))  # a span has signed numbers
        request = Request(
            id=next(self.ids),
            prompt=prompt if isinstance(prompt, array) else array("I", prompt),
            media=media,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_sequences=options.stop_sequences,
            keep_stop_text=options.keep_stop_text,
            visible_special=options.visible_special,
            stop_token_ids=frozenset(options.stop_token_ids),
            ignore_eos=options.ignore_eos,
            min_new_tokens=min(options.min_new_tokens, max_new_tokens),  # where no more fit after the prompt
            logprobs=options.logprobs,
            grammar=grammar,
            adapter=options.adapter,
            qos=qos,
            tokenized=tokenized,
            prediction=prediction,
        )
        check_supported(request, options.api, self.limits.unsupported)
        scored = (options.logprobs.tokens or self.limits.always_logprobs) and "tokens" not in self.limits.unsupported
        if scored != options.logprobs.tokens:
            request = replace(request, logprobs=replace(options.logprobs, tokens=scored))
        for _ in range(count):
            self.metrics.requests.max_new_tokens.observe(max_new_tokens)
        return [
            request,
            *(replace(request, id=next(self.ids), sampling=sampling.for_answer(index)) for index in range(1, count)),
        ]

    async def proven(self, asked: Grammar | Mapping[str, Any], tenant: TenantId) -> Grammar:
        """Return a grammar as the engine gets it, once it is known that the engine can follow it. Raises InvalidRequest.

        These are rules 17 to 19.
        """
        if self.grammars is None:  # before it is read
            raise NotSupported("grammar is not supported")
        grammar = asked if isinstance(asked, Grammar) else tgi_grammar(asked)
        is_translated = grammar.kind in TRANSLATED and self.serves_grammar(GrammarKind.LARK)
        if not is_translated and not self.serves_grammar(grammar.kind):
            raise NotSupported(f"grammar is not supported: this engine follows none of kind `{grammar.kind.value}`")
        proven = await self.grammars.prove(grammar, tenant)
        return proven if is_translated else grammar

    def split_images(self, text: str) -> tuple[str, Sequence[str]]:
        """Return a text in which images in TGI's form are those of the model, and their sources."""
        return (text, ()) if self.images is None else self.images.tokens.split(text)

    def with_images(self, conversation: Conversation) -> Conversation:
        """Return a chat in which those images in TGI's form that can be read are parts of the users' messages.

        Raises InvalidRequest if there are images and the model takes none.
        """
        if self.images is not None:
            return replace(conversation, messages=self.images.divided(conversation.messages))
        if conversation.images:
            said = "image modality is not supported: this model takes no images"
            raise InvalidRequest(said, code="unsupported_value")
        return conversation

    async def count_tokens(self, text: str, images: Sequence[str], tenant: TenantId) -> int:
        """Return the number of tokens of the prompt of a chat. Raises as `prepare` does."""
        if self.images is None:
            return len(await self.tokenizer.encode_ids(text, add_special_tokens=False, tenant=tenant))
        pictures, text = await self.images.read(images, tenant), self.images.tokens.spelled(text)
        ids = await self.tokenizer.encode_ids(text, add_special_tokens=False, tenant=tenant)
        return len(self.images.tokens.place(ids, pictures)[0])

    async def tokens_before(self, ending: str, request: Request) -> int:
        """Return the number of tokens of a prompt before `ending`, the end of its text, in which images have no tokens yet."""
        before, *after = [ending] if self.images is None else self.images.tokens.texts_around(ending)
        # The tokens from its first image on are known.
        stop = request.media[-len(after)].offset if after else len(request.prompt)
        qos = request.qos
        ids = await self.tokenizer.encode_ids(before, add_special_tokens=False, tenant=qos.tenant, salt=qos.salt)
        start = max(0, stop - len(ids))
        # Where they differ, a token lies across the start of the ending.
        return start if list(request.prompt[start:stop]) == list(ids) else max(0, start - 1)

    async def _prompt(
        self,
        inputs: str | Sequence[TokenId],
        options: GenerationOptions,
        qos: QualityOfService,
        images: Sequence[str],
        count: int,
    ) -> tuple[Sequence[TokenId], tuple[PlacedImage, ...]]:
        reader, media = self.images, tuple[PlacedImage, ...]()
        pictures = [] if reader is None else await reader.read(images, qos.tenant, count)
        if isinstance(inputs, str):
            text = inputs if reader is None else reader.tokens.spelled(inputs)
            ids: Sequence[TokenId] = await self._encode(text, options, qos)
        else:
            ids = array("I", inputs)
            check_token_ids("prompt", ids, self.limits)
        if reader is not None:
            ids, media = reader.tokens.place(ids, pictures)
        if options.truncate is not None:
            if media and len(ids) > options.truncate:
                raise NotSupported("`truncate` is not supported for a prompt with images that is longer")
            ids = ids[-options.truncate :]
        if not ids:  # the tokenizer dropped the whole text and added nothing
            options.check_prompt(ids)
        return ids, media

    async def with_bad_words(self, options: GenerationOptions, tenant: TenantId) -> GenerationOptions:
        """Return the options with the tokens of each bad word, and of the word after a space, as vLLM does.

        Raises InvalidRequest.
        """
        if not options.bad_words:
            return options
        read: list[tuple[TokenId, ...]] = []
        for word in options.bad_words:
            if not word.strip():
                raise InvalidRequest("`bad_words` must not be blank")
            alone, spaced = [
                tuple(await self.tokenizer.encode_ids(text, add_special_tokens=False, tenant=tenant))
                for text in (word.lstrip(), f" {word.lstrip()}")
            ]
            read.append(alone)
            if len(spaced) == len(alone) and spaced[:1] != alone[:1]:
                read.append(spaced)
        known = tuple(dict.fromkeys(filter(None, read)))
        if len(known) > MAX_BAD_WORDS or sum(map(len, known)) > MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"`bad_words` supports up to {MAX_BAD_WORDS} words of {MAX_BAD_WORD_TOKENS} tokens in all"
            )
        self._check_encoded("bad_words", [token for word in known for token in word])
        return replace(options, bad_words=(), sampling=replace(options.sampling, bad_words=known))

    async def _prediction(self, text: str, qos: QualityOfService) -> Sequence[TokenId]:
        """Return the tokens of a prediction, which has as many as a sequence at most. Raises InvalidRequest."""

        def check(count: int) -> None:
            if count > (most := self.limits.max_total_tokens):
                raise InvalidRequest(f"`prediction` must have at most {most} tokens. Given: at least {count}")

        with about("prediction"):
            ids = await self.tokenizer.encode_ids(
                text, add_special_tokens=False, tenant=qos.tenant, salt=qos.salt, check=check
            )
            check(len(ids))
            self._check_encoded("prediction", ids)
        return ids

    async def _encode(self, text: str, options: GenerationOptions, qos: QualityOfService) -> Sequence[TokenId]:
        """Return the tokens of a text. Raises InvalidRequest.

        Two megabytes take seconds to tokenize, and nearly all such texts are far past the limit: rule 15 is checked for
        their beginnings. The message is TGI's, with a lower bound in place of the count.
        """

        def check(count: int) -> None:
            if options.truncate is None and len(text) > COUNTED_EXACTLY:
                check_total(count, options, self.limits, given=f"at least {count}")

        special = options.add_special_tokens
        ids = await self.tokenizer.encode_ids(
            text, add_special_tokens=special, tenant=qos.tenant, salt=qos.salt, check=check
        )
        self._check_encoded("inputs", ids)
        return ids

    def _check_encoded(self, name: str, ids: Sequence[TokenId]) -> None:
        """Raise InvalidRequest if one of the tokens of a text is none of the model: a tokenizer may have more."""
        if self.tokenizer.vocabulary > self.limits.vocab_size:
            check_token_ids(name, ids, self.limits)
