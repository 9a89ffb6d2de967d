"""Drafts by lookup: the tokens that followed the last ones of a sequence before, in its own text, its prediction or recent outputs.

An index has the places after each run of RUN tokens; of the last ones, that with the longest match is taken. A sequence follows the
text there as long as its new tokens equal it, which costs one comparison a token; after an edit it may return to it. Texts are
token ids. A prediction is followed from its start on. Recent outputs are kept by scope, two generations of RECENT_TOKENS each:
sequences of different scopes share nothing.
"""

from collections import OrderedDict
from collections.abc import MutableSequence
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field
from itertools import takewhile

from text_generation_proto.values import OWN, PREDICTION, RECENT
from text_generation_shard.step.drafts.length import Acceptance
from text_generation_shard.step.sequence import Draft, Sequence

RUN = 3
CANDIDATES = 8
"""Places of a run that are compared."""
EDITED_TOKENS = 6
"""Tokens after the place that a sequence left in which it may return to the text."""
LONGEST_MATCH = 32
"""Last tokens that are compared with those before a place."""
INDEXED_TOKENS = 32768
"""Tokens of a sequence that are indexed, the last ones, and of its prediction, the first ones. About 4 MB each."""
TOKENS_AT_ONCE = 4096
"""Tokens of all texts that are indexed in a step, about a millisecond."""
RECENT_TOKENS = 16384
RECENT_SCOPES = 32
END = (1 << 20) - 1
"""Ends an output among others: no token. Ids have 20 bits."""


class TokenIndex:
    """The places after each run of RUN tokens in `tokens`, which may grow, from token `start` on."""

    def __init__(self, tokens: MutableSequence[int], start: int = 0) -> None:
        self.tokens = tokens
        self.end = start
        """Runs that end here or before are indexed."""
        self._first = start + RUN
        self._last: dict[int, int] = {}
        """The last place of each run."""
        self._before: list[int] = []
        """For each place, from `_first` on, the one before it with the same run; 0 without."""

    def extend(self, end: int) -> None:
        """Index the runs that end at `end` or before."""
        low, self.end = max(self.end + 1, self._first), max(self.end, end)
        tokens, last, before = [*self.tokens[low - RUN : end]], self._last, self._before
        for place, (a, b, c) in enumerate(zip(tokens, tokens[1:], tokens[2:], strict=False), low):
            key = a << 40 | b << 20 | c
            before.append(last.get(key, 0))
            last[key] = place

    def find(self, end: Sequences[int]) -> tuple[int, int]:
        """Return the place after the most tokens that equal the end of a text, and their number; (0, 0) if they are too few."""
        if len(end) < RUN:
            return 0, 0
        place = self._last.get(end[-3] << 40 | end[-2] << 20 | end[-1], 0)
        best = 0, 0
        for _ in range(CANDIDATES):
            if not place:
                break
            before = self.tokens[max(self._first - RUN, place - len(end)) : place]
            pairs = zip(reversed(before), reversed(end), strict=False)
            if (length := sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))) > best[1]:
                best = place, length
            place = self._before[place - self._first]
        return best


@dataclass(slots=True)
class _Followed:
    """The place in a text that a sequence is expected to follow."""

    tokens: Sequences[int]
    place: int
    match: int
    source: str


def _returned(left: _Followed | None, last: int) -> _Followed | None:
    """Return the place after the token `last` soon after the place that was left: an edit may have replaced what is between."""
    near: Sequences[int] = [] if left is None else left.tokens[left.place : left.place + EDITED_TOKENS]
    if left is None or last not in near:
        return None
    return _Followed(left.tokens, left.place + near.index(last) + 1, 1, left.source)


@dataclass(slots=True)
class _Known:
    """The state of a sequence."""

    sequence: Sequence
    index: TokenIndex
    predicted: TokenIndex
    seen: int = 0
    """Tokens that were compared."""
    followed: _Followed | None = None
    left: _Followed | None = None
    """The place that it followed last, until it follows another."""


@dataclass(slots=True)
class _Recent:
    """Outputs of one scope: those that are added to, and the ones before."""

    current: TokenIndex = field(default_factory=lambda: TokenIndex([]))
    before: TokenIndex = field(default_factory=lambda: TokenIndex([]))

    def add(self, tokens: Sequences[int]) -> None:
        if len(self.current.tokens) >= RECENT_TOKENS:
            self.before, self.current = self.current, TokenIndex([])
        self.current.tokens += [*tokens[-RECENT_TOKENS:], END]
        self.current.extend(len(self.current.tokens) - 1)


class LookupDrafts:
    """Drafts by lookup, for the sequences of an engine. Tells `acceptance` of each token that followed a match."""

    def __init__(self, acceptance: Acceptance) -> None:
        self._acceptance = acceptance
        self._known: dict[int, _Known] = {}
        """By slot."""
        self._recent: OrderedDict[tuple[str, str], _Recent] = OrderedDict()
        """By scope, the last used at the end."""
        self._room = TOKENS_AT_ONCE
        """Tokens that may still be indexed in this step."""

    def forget_ended(self) -> None:
        """Begin a step: forget the sequences that ended; keep what they generated."""
        self._room = TOKENS_AT_ONCE
        for slot, known in list(self._known.items()):
            if not (sequence := known.sequence).is_held:
                del self._known[slot]
                self._keep(sequence)

    def drafts(self, sequence: Sequence, most: int) -> Draft | None:
        """Return at most `most` tokens that may come next; None without a match."""
        known = self._known.get(sequence.slot)
        if known is None or known.sequence is not sequence:
            if known is not None:
                self._keep(known.sequence)
            first = max(0, len(sequence.tokens) - INDEXED_TOKENS)
            predicted = TokenIndex(sequence.prediction)
            known = self._known[sequence.slot] = _Known(sequence, TokenIndex(sequence.tokens, first), predicted)
            if sequence.prediction:
                known.followed = _Followed(sequence.prediction, 0, 0, PREDICTION)
                known.seen = sequence.prompt_length - sequence.generated_before
        self._catch_up(known)
        if (followed := known.followed) is None or known.seen < len(sequence.tokens) or most < 1:
            return None
        tokens = followed.tokens[followed.place : followed.place + most]
        if followed.tokens is sequence.tokens and len(tokens) < most:
            tokens = ([*tokens] * most)[:most]  # it repeats itself
        if END in tokens:
            tokens = tokens[: tokens.index(END)]
        return Draft(tuple(tokens), followed.source, followed.match) if tokens else None

    def _catch_up(self, known: _Known) -> None:
        """Compare the new tokens with those followed; look the last ones up if they differ."""
        tokens, index, predicted = known.sequence.tokens, known.index, known.predicted
        end, predicted_end = len(tokens), min(len(predicted.tokens), INDEXED_TOKENS)
        if end == known.seen:
            return
        for each, indexed in ((predicted, predicted_end), (index, end - 1)):
            if (behind := indexed - each.end) > 0:
                part = min(behind, self._room)
                self._room -= part
                each.extend(each.end + part)
                if part < behind:
                    return
        if known.followed is not None and not self._follow(known.followed, tokens[known.seen :]):
            known.followed, known.left = None, known.followed
        known.seen = end
        if known.followed is None:
            known.followed = self._found(known, tokens[-LONGEST_MATCH:]) or _returned(known.left, tokens[-1])
        index.extend(end)

    def _follow(self, followed: _Followed, tokens: Sequences[int]) -> bool:
        """Go on by some tokens; return False if they are others, or the text ends."""
        for token in tokens:
            if followed.place == len(followed.tokens) or (expected := followed.tokens[followed.place]) == END:
                return False
            self._acceptance.add(followed.source, followed.match, right=token == expected)
            if token != expected:
                return False
            followed.place += 1
            followed.match += 1
        return True

    def _found(self, known: _Known, last: Sequences[int]) -> _Followed | None:
        best = None
        indices = [(known.predicted, PREDICTION), (known.index, OWN)]
        if recent := self._recent.get(known.sequence.draft_scope):
            indices += (recent.current, RECENT), (recent.before, RECENT)
        for index, source in indices:
            place, match = index.find(last)
            if match > (0 if best is None else best.match):
                best = _Followed(index.tokens, place, match, source)
        return best

    def _keep(self, sequence: Sequence) -> None:
        scope = sequence.draft_scope
        recent = self._recent.setdefault(scope, _Recent())
        self._recent.move_to_end(scope)
        recent.add(sequence.tokens[sequence.prompt_length :])
        if len(self._recent) > RECENT_SCOPES:
            self._recent.popitem(last=False)
