"""Graph passes: canonicalize, match, rewrite; and a registry for attention that t5fx does not know."""

from .canonicalize import AttentionCall, canonicalize, occurrences
from .match import Match, match
from .registry import register, unregister
from .rewrite import rewrite

__all__ = ["AttentionCall", "Match", "canonicalize", "match", "occurrences", "register", "rewrite", "unregister"]
