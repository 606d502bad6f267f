"""The command line: one module per command, and `main` that assembles them.

Holds: main the app and its errors; options shared options, the engine's made from EngineConfig; loading
load a model; demo, generate, chat, probe, bench, serve, batch, audit, keygen a command each.
State: none; a command owns the engine it loads.
Imports: every package except testing; those that need torch inside functions, so that --help is fast.
"""
