import itertools, sys, numpy as np, torch
from samewise.model.attention import Rows, PAGE
import samewise.model.attention.triton as T
dev=torch.device("cuda")
Hq,Hkv,D=32,8,128
def make(seqs, each, ctx, R=128):
    per=-(-ctx//PAGE)
    lengths=np.zeros(R,np.int32); slots=np.zeros(R,np.int32); start=np.zeros(R,np.int32)
    r=0
    for i in range(seqs):
        for j in range(each):
            pos=ctx-each+j; lengths[r]=pos+1; start[r]=i*per
            slots[r]=(1+i*per+pos//PAGE)*PAGE+pos%PAGE; r+=1
    pages=np.arange(1,seqs*per+1,dtype=np.int32)
    return lengths,slots,start,pages
def bench(seqs,each,ctx,programs,cache):
    lengths,slots,start,pages=make(seqs,each,ctx)
    t=lambda a: torch.from_numpy(a).to(dev)
    sp=T.splits(lengths)
    k=T.TritonKernel(programs)
    ws=torch.empty(k.workspace_len(128,32768 if ctx>2048 else 2048,Hq,D),device=dev)
    rows=Rows(t(lengths),t(slots),t(start),t(pages),t(sp.astype(np.int32)),ws)
    q=torch.randn(128,Hq,D,device=dev,dtype=torch.bfloat16)
    kk=torch.randn(128,Hkv,D,device=dev,dtype=torch.bfloat16); v=torch.randn_like(kk)
    N=len(cache)
    f=lambda i: k(q,kk,v,cache[i],rows,scale=0.088,window=None)
    f(0); torch.cuda.synchronize()
    g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for i in range(N): f(i)
    ts=[]
    for _ in range(12):
        a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); b.synchronize(); ts.append(a.elapsed_time(b)/N*1e3)
    return sorted(ts)[len(ts)//2]
k=T.TritonKernel(528)
cache=[k.allocate(128*64+2,Hkv,D,torch.bfloat16,dev) for _ in range(6)]
for c in cache: c.k.normal_(); c.v.normal_()
print("ideal 128x1@1024 us", 128*1024*Hkv*D*2*2/4.3e12*1e6)

T.SPLIT,T.BLOCK,T.WARPS,T.STAGES=256,64,4,3
big=[k.allocate(2050,Hkv,D,torch.bfloat16,dev) for _ in range(6)]
for CH,CW,P in [(16,4,4),(16,2,4),(16,1,4),(8,4,4),(8,2,4),(8,1,4),(4,4,4),(4,2,4),(4,1,4),(8,2,8),(8,1,8),(4,1,8),(4,1,16)]:
    T.CHUNK,T.COMBINE_WARPS=CH,CW
    r=[bench(*x,P*132,cache) for x in ((128,1,1024),(1,1,1024),(1,128,1024),(32,4,1024))]
    r.append(bench(1,1,32768,P*132,big))
    print("chunk",CH,"combine warps",CW,"prog",P," ".join(f"{x:.1f}" for x in r),flush=True)
