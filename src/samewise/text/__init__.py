"""Text and tokens: detokenizing, stop strings, grammars and chat templates.

Holds: `byte_tokens` the bytes of byte-level tokens; `detokenize` tokens to text as they are generated, and
stop strings; `grammar` masks of allowed tokens; `chat_template` conversations to prompt text;
`date_format` dates in them, in no locale; `text_trial` the contract's fact about all of these.
State: a stream or guide belongs to one sequence; `Grammars` owns the cache of compiled grammars and
`TokenBytes` that of token bytes.
Imports: errors, types.
"""
