"""Graph passes: canonicalize, match, rewrite; and a registry for attention that t5fx does not know."""

from .canonicalize import AttentionCall
from .match import Match
from .registry import register, unregister

__all__ = ["AttentionCall", "Match", "register", "unregister"]
