"""`samewise bench`: the same questions to engines and peers, interleaved in one run.

Holds: options what to measure; workload the questions; measurement one timed run and medians; engines this
engine under each proposer; peers transformers, vLLM and llama.cpp; llama_server llama.cpp's process;
first_token the time of a long prompt; run the benchmark; report tables and pictures; timeline the phases of
the proposer skip.
State: none; a run owns the engines it builds.
Imports: llm, engine, draft, execute, model and what they import.
"""
