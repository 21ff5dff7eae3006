"""Every error that t5fx raises on purpose derives from :class:`T5fxError`.

A message says what was wrong, where (the module's name) and what to do about it.
"""


class T5fxError(Exception):
    """Base class of all errors raised by t5fx."""


class ConfigError(T5fxError, ValueError):
    """A :class:`t5fx.TTTConfig` (or another setting) holds a value that can't be used."""


class InputError(T5fxError, ValueError):
    """Example inputs are missing, or the model can't be run with them."""


class CaptureError(T5fxError, RuntimeError):
    """The forward of a module could not be captured as a graph; ``code`` is that of the refusal it leads to."""

    def __init__(self, message: str, code: str = "capture") -> None:
        super().__init__(message)
        self.code = code


class LayoutError(T5fxError, ValueError):
    """The token grid of a site is unknown, or disagrees with the number of tokens."""


class SelectionError(T5fxError, ValueError):
    """A selector matched nothing, or only sites that can't be converted."""


class MaskError(T5fxError, ValueError):
    """An attention mask at run time is not the kind that the converted site supports."""


class RecipeError(T5fxError, ValueError):
    """A saved recipe does not fit the model it is loaded into."""


class TrainingError(T5fxError, RuntimeError):
    """Training went wrong: a loss, a gradient or a fast weight is not finite.  ``site`` is where, if that is known."""

    def __init__(self, message: str, site: str | None = None) -> None:
        super().__init__(message)
        self.site = site
