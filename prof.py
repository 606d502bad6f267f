import torch
from torch.profiler import profile, ProfilerActivity
import sys; sys.path.insert(0,"bench")
import frame as F
from samewise.engine import Engine
from samewise.config import EngineConfig
from samewise.run.frame import pack_frame
loaded=F.random_on_card(F.shape_8b())
e=Engine(loaded, EngineConfig(model="8b", dtype="bfloat16", device="cuda", max_model_len=2048, kv_memory=20*2**30, max_num_seqs=128))
for n in (1,128):
    spans=F.spans_of(n,1,1024,loaded.arch.vocab)
    for _ in range(3): e.verifier.launch(spans).verdicts()
    ms=F.timed(lambda: e.verifier.run(spans),30,torch.device("cuda")); print("run ms",n,ms)
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(3): e.verifier.launch(spans).verdicts()
    rows=sorted(p.key_averages(), key=lambda r:-r.self_device_time_total)[:16]
    for r in rows: print(f"{r.self_device_time_total/3:9.0f} us x{r.count/3:5.0f}  {r.key[:90]}")
print(F.host_time(e,1024))
import cProfile,pstats
for i in range(128): e.add([(i*31+7*j)%1000+1 for j in range(960)],F.GREEDY,max_tokens=200)
while e.scheduler.counts.output_tokens<128*170: e.step()
pr=cProfile.Profile(); pr.enable()
for _ in range(40): e.step()
pr.disable(); pstats.Stats(pr).sort_stats("tottime").print_stats(18)
