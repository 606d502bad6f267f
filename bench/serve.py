"""Measures tokens/s streamed over HTTP relative to the engine alone. Last line: JSON.

    OMP_NUM_THREADS=2 python bench/serve.py --clients 8

One server process, one engine, the event loop of `samewise serve`: uvloop where it is installed. In turns, on
the same prompts: the engine alone (`add`, then `step` until idle, on its own thread, no text), and as many
clients as requests, streaming completions from another process. The ceiling is 1. Beside it: the same ratio
of the process's CPU time, which depends less on other load of the machine and counts the server's work even
where it overlaps with the engine; and the CPU time of the event loop's thread. Nothing is shared between
runs: prefixes are separated by salt, drafts by `share: false`.

With `--model tiny` the model costs almost nothing, and the result is the server's own cost: microseconds of
CPU per streamed token, over all threads, and of the event loop's thread.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time

PATH = "/v1/completions"


def prompts(number: int, clients: int) -> list[str]:
    """The prompts of one repeat: questions of the benchmark workload, in turn."""
    from samewise.bench import workload

    questions = [question.text for question in workload.read()]
    return [questions[(number * clients + i) % len(questions)][:160] for i in range(clients)]


# ---- server


def serve(args: argparse.Namespace) -> None:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import JSONResponse

    from samewise import AsyncLLM, SamplingParams
    from samewise.serve.app import make_app

    def load() -> AsyncLLM:
        if args.model == "tiny":
            from samewise.testing import tiny_engine

            return AsyncLLM.over(tiny_engine(proposer=args.proposer, max_num_seqs=max(8, args.clients)))
        return AsyncLLM(args.model, proposer=args.proposer, max_num_seqs=max(8, args.clients))

    async def main() -> None:
        async with load() as llm:
            app = make_app(llm)
            intake, engine = llm.intake, llm._engine
            gc.collect()
            gc.freeze()  # as `samewise serve`: otherwise collections of the model's objects are measured
            params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True, share=False)

            def run_engine(number: int) -> dict:
                requests = [intake.check(prompt, params) for prompt in prompts(number, args.clients)]
                tokens, began = 0, time.perf_counter()
                for one in requests:
                    engine.add(one.request(engine.new_id(), 0, leader=None, salt=f"alone {number}".encode()))
                while not engine.idle:
                    tokens += sum(len(delta.tokens) for delta in engine.step())
                return {"tokens": tokens, "seconds": time.perf_counter() - began}

            async def engine_alone(request: Request) -> JSONResponse:
                number = int(request.query_params["number"])
                return JSONResponse(await llm._call(lambda: run_engine(number)))

            async def cpu(_: Request) -> JSONResponse:
                return JSONResponse([time.process_time(), time.thread_time()])  # process, event loop's thread

            app.add_route("/engine", engine_alone)
            app.add_route("/cpu", cpu)
            server = uvicorn.Server(
                uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
            )
            with socket.create_server(("127.0.0.1", 0)) as listener:
                print(
                    json.dumps({"port": listener.getsockname()[1], "contract": llm.contract.id}), flush=True
                )
                await server.serve(sockets=[listener])

    with asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory()) as runner:
        runner.run(main())


# ---- clients: plain sockets, so that their own cost is small


async def fetch(port: int, method: str, path: str, body: bytes = b"") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = (
        f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )  # fmt: skip
    writer.write("".join(f"{line}\r\n" for line in (*lines, "")).encode())
    writer.write(body)
    response = await reader.read(-1)
    writer.close()
    return response


async def stream_all(port: int, number: int, args: argparse.Namespace) -> dict:
    bodies = [
        json.dumps({"prompt": prompt, "temperature": 0, "max_tokens": args.tokens, "ignore_eos": True,
                    "stream": True, "stream_options": {"include_usage": True}, "share": False,
                    "cache_salt": f"http {number}"})
        for prompt in prompts(number, args.clients)
    ]  # fmt: skip
    began = time.perf_counter()
    responses = await asyncio.gather(*(fetch(port, "POST", PATH, body.encode()) for body in bodies))
    seconds = time.perf_counter() - began
    tokens = 0
    for response in responses:
        events = [line for line in response.decode().splitlines() if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]", response[-500:]
        tokens += json.loads(events[-2].removeprefix("data: "))["usage"]["completion_tokens"]
    return {"tokens": tokens, "seconds": seconds}


async def measure(port: int, args: argparse.Namespace) -> list[dict]:
    async def get(path: str):
        return json.loads((await fetch(port, "GET", path)).split(b"\r\n\r\n", 1)[1])

    rows = []
    for number in range(-args.warm, args.repeats):
        work = [("own", get(f"/engine?number={number}")), ("http", stream_all(port, number, args))]
        row: dict = {}
        for name, one in work if number % 2 else reversed(work):
            before = await get("/cpu")
            result = await one
            assert result["tokens"] == args.tokens * args.clients, result
            row[name] = result["tokens"] / result["seconds"]
            after = await get("/cpu")
            row[f"{name}_cpu"], row[f"{name}_loop"] = (b - a for a, b in zip(before, after, strict=True))
        if number >= 0:
            ratios = {
                "ratio": row["http"] / row["own"],
                "cpu_ratio": row["own_cpu"] / row["http_cpu"],
                "loop_us": 1e6 * row["http_loop"] / (args.tokens * args.clients),
                "token_us": 1e6 * (row["http_cpu"] - row["own_cpu"]) / (args.tokens * args.clients),
            }
            rows.append(row | ratios)
            print(
                f"  engine {row['own']:8.1f}   http {row['http']:8.1f} tokens/s   {ratios['ratio']:.3f}   "
                f"CPU {row['own_cpu']:.2f} and {row['http_cpu']:.2f} s   {ratios['cpu_ratio']:.3f}   "
                f"event loop {row['http_loop']:.2f} s   {ratios['token_us']:.0f} µs/token",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--proposer", default="auto")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--warm", type=int, default=1, help="repeats before the measurement")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", *sys.argv[1:]], stdout=subprocess.PIPE, text=True
    )
    try:
        if not (line := server.stdout.readline()):
            sys.exit("the server did not start: it says why above; what it needs brings the extra `serve`")
        started = json.loads(line)
        print(f"{args.model}, proposer {args.proposer}, {args.clients} clients of {args.tokens} tokens, "
              f"contract {started['contract']}; {platform.machine()}, {os.cpu_count()} cores, "
              f"load {os.getloadavg()[0]:.1f}", flush=True)  # fmt: skip
        rows = asyncio.run(measure(started["port"], args))
    finally:
        server.terminate()
        server.wait(30)
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    print(f"median: engine {median['own']:.1f}, http {median['http']:.1f} tokens/s, "
          f"ratio {median['ratio']:.3f}; "
          f"of CPU time {median['cpu_ratio']:.3f}, of which the event loop took "
          f"{median['http_loop'] / median['http_cpu']:.1%}; beside the engine, a token took "
          f"{median['token_us']:.0f} µs of CPU, the event loop's thread {median['loop_us']:.0f}")  # fmt: skip
    options = {name: getattr(args, name) for name in ("model", "proposer", "clients", "tokens")}
    result = {"median": median, "repeats": rows, "load": os.getloadavg()[0]}
    print(json.dumps(options | result | {"contract": started["contract"]}))


if __name__ == "__main__":
    main()
