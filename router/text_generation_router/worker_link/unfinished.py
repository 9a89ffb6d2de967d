"""UnfinishedRequest: the record of a request in an HTTP worker, by which it goes on in another scheduler process."""

from array import array

from text_generation_router.errors import DeadlineExceeded
from text_generation_router.request import NO_MOVES, Request, RequestProgress


class UnfinishedRequest:
    __slots__ = ("accepted", "generated", "generated_when_placed", "moves", "request", "scored")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.accepted = False
        """It was sent to a scheduler process."""
        self.generated: array[int] = array("I")
        self.moves = NO_MOVES
        self.generated_when_placed: int | None = None
        """New tokens at its last placement; None while it has no replica."""
        self.scored = False
        """The log-probabilities of its prompt were delivered."""

    @property
    def progress(self) -> RequestProgress | None:
        """The progress for the next scheduler process; None if it was sent to none before."""
        return RequestProgress(self.generated, self.moves) if self.accepted else None

    @property
    def has_run(self) -> bool:
        """True if it has left the queue."""
        return self.generated_when_placed is not None or self.moves.total > 0

    @property
    def due(self) -> float:
        return self.request.qos.expires(queued=not self.has_run)

    def count_loss(self) -> bool:
        """Count the loss of its replica, or of the link; False if it had no replica."""
        if self.generated_when_placed is None:
            return False
        self.moves = self.moves.after_loss(advanced=len(self.generated) > self.generated_when_placed)
        self.generated_when_placed = None
        return True

    def expired(self) -> DeadlineExceeded:
        """Return the error of a request that is late."""
        return DeadlineExceeded(self.request.qos.late(len(self.generated), queued=not self.has_run))
