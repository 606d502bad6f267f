"""Everything that can go wrong, as a tree.

    SamewiseError
    ├── CallerError (ValueError)      your mistake: says what, which value, what to do
    │   ├── BadPrompt                   empty, out of vocabulary, not text
    │   │   └── PromptTooLong             longer than the context, or than the KV cache holds
    │   ├── BadParameter                a sampling or engine parameter out of range
    │   ├── BadReceipt                  not a receipt, damaged, changed, or of another version
    │   ├── UnknownModel                no such folder, file, hub id or built-in name
    │   ├── UnsupportedModel            loads, but cannot be run under the promise; says why
    │   └── QueueFull                   too many requests waiting; try again later
    ├── MachineError (RuntimeError)   the machine's: no compiler, no memory, a full disk
    │   └── EngineLost                  a device error, or a broken guarantee, ended the engine: build another
    ├── RequestFailed (RuntimeError)  one request failed inside the engine; the others go on
    ├── GuaranteeLost (RuntimeError)  bits may not be the contract's: a probe failed, weights changed
    └── InvariantBroken (AssertionError)  our bug; never caught, please report it

Imports no other module of the package.
"""


class SamewiseError(Exception):
    """Root of every error this package raises on purpose."""


class CallerError(SamewiseError, ValueError):
    """The caller's mistake. The message names the value and the remedy.

    `param` is the name of the parameter the error is about, where it is about one; a server returns it as
    OpenAI's `param` field.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class BadPrompt(CallerError):
    """A prompt that cannot be run: empty, too long, or not made of known tokens."""


class PromptTooLong(BadPrompt):
    """A prompt that does not fit the context, or a request that could outgrow the KV cache."""


class BadParameter(CallerError):
    """A parameter out of its range or of the wrong type."""


class BadReceipt(CallerError):
    """A receipt that cannot be read: damaged, changed after it was made, or of another version."""


class UnknownModel(CallerError):
    """A model name that resolves to nothing."""


class UnsupportedModel(CallerError):
    """A model that exists but cannot be run under the promise."""


class QueueFull(CallerError):
    """More requests are waiting than the engine was configured to hold."""


class MachineError(SamewiseError, RuntimeError):
    """The machine lacks something: a compiler, memory, disk, a device."""


class EngineLost(MachineError):
    """The engine cannot go on: a device error, a lost guarantee or a broken invariant. Build another one."""


class RequestFailed(SamewiseError, RuntimeError):
    """One request failed inside the engine and was ended; the log says why. Other requests go on."""


class GuaranteeLost(SamewiseError, RuntimeError):
    """The bits may not be the contract's: a probe failed, or weights were replaced. The engine refuses."""


class InvariantBroken(SamewiseError, AssertionError):
    """A bug in this package. Never caught; please report it with the message."""


__all__ = [
    "BadParameter",
    "BadPrompt",
    "BadReceipt",
    "CallerError",
    "EngineLost",
    "GuaranteeLost",
    "InvariantBroken",
    "MachineError",
    "PromptTooLong",
    "QueueFull",
    "RequestFailed",
    "SamewiseError",
    "UnknownModel",
    "UnsupportedModel",
]
