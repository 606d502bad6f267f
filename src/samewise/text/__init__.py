"""Text and tokens: detokenizing, stop strings, grammars and chat templates.

Holds: `byte_tokens` the bytes of byte-level tokens; `detokenize` tokens to text as they are generated, and
stop strings; `grammar` masks of allowed tokens; `grammar_source` a grammar's text to llguidance's matcher;
`compile_queue`, `compile_process` and `compile_child` compile grammars of strangers under limits, in a child
process; `chat_template` conversations to prompt text; `control_tokens` messages whose control tokens stay
text; `date_format` dates in them, in no locale; `text_trial` the contract's fact about all of these.
State: a stream or guide belongs to one sequence; `Grammars` owns the cache of compiled grammars and their
child processes, and
`TokenBytes` that of token bytes.
Imports: errors, types.
"""
