"""Jobs over files: answering a batch of requests, and auditing receipts.

Holds: `batch` answers a file of requests; `batch_file` its input and output files; `audit` replays receipts;
`replay` the proposer of recorded tokens; `compare` a replay beside its receipt; `finding` the result;
`portable` compares this machine's bits with those that every machine must give.
State: a `BatchRunner` or `Auditor` owns the step loop of its engine, an `OutputFile` its locked file.
Imports: openai, llm, receipts, engine, draft, execute, model, kernels, and the base modules.
"""
