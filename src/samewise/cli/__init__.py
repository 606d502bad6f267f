"""The command line: one module per command, and `main` that assembles them.

Holds: main the app and its errors; options shared options, the engine's made from EngineConfig; loading
load a model; demo, generate, chat, probe, bench, serve, batch, audit, keygen a command each.
State: none; a command owns the engine it loads.
Imports: every room but testing, inside the functions that need them, so that --help needs no torch.
"""
