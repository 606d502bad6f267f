"""Receipts: what was requested and answered under which contract, so that an answer can be audited.

Holds: `receipt` the Receipt type; `create` makes receipts of finished answers; `reader` parses and checks
them; `digests` canonical JSON and digests; `signing` ed25519 keys and signatures; `store` receipts in files.
State: none in memory; a receipts folder belongs to its callers.
Imports: config, contract, errors, user_cache, outputs, params, types.
"""

from samewise.receipts.create import is_complete, make
from samewise.receipts.digests import logprob_check, logprob_digest, prompt_digest
from samewise.receipts.reader import from_json, loads
from samewise.receipts.receipt import KIND, NO_PROMISE, PROMISE, VERSION, Receipt, Settings
from samewise.receipts.signing import Signature, SigningKey, new_key, read_public

__all__ = [
    "KIND",
    "NO_PROMISE",
    "PROMISE",
    "VERSION",
    "Receipt",
    "Settings",
    "Signature",
    "SigningKey",
    "from_json",
    "is_complete",
    "loads",
    "logprob_check",
    "logprob_digest",
    "make",
    "new_key",
    "prompt_digest",
    "read_public",
]
