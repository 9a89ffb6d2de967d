"""Which conversation a request belongs to: known by name."""

from __future__ import annotations

from trtllm_standin.arguments import NameOnly


class ConversationParams(NameOnly):
    """See NameOnly."""
