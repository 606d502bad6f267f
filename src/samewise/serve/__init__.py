"""The OpenAI-compatible HTTP server.

Holds: app routes; http bodies and event streams; middleware request ids, keys and web pages; limits and
connections what clients may hold; threads work outside of the event loop; worker the engine behind the
routes; training the routes of trainers; openapi the generated document and /docs; metrics; web_page and
live_feed the page in page/; settings; listen the address; logs; process the server as a process. State:
Worker owns the engine and the active requests, Service its metrics, LiveFeed its sampler. Imports:
openai, llm, receipts, engine, verify, outputs, contract, errors.
"""
