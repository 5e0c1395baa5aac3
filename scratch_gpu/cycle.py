import os, time, json, torch, sys
from fxoffload.phases import PhaseManager
from fxoffload.phases import mover as M
from fxoffload.phases.storages import Where
def sizes():
    h,f,kv=4096,12288,1024
    out=[]
    for _ in range(16): out+= [h*h,h*kv,h*kv,h*h,h*f,h*f,f*h,h,h,128,128]
    return out
def first_alloc(self, holdings, give_back):
    for d in {h.device for h in holdings}: pass
    for h in holdings: h.storage.resize_(h.nbytes)
    for d in {h.device for h in holdings}: self.copies(d).reload_waits_for_compute()
    t=time.perf_counter()
    for h in holdings:
        target=h.bytes_on_device(); copies=self.copies(h.device)
        with copies.reloading():
            h.event=copies.reload((target[a:a+p.numel()],p) for a,p in self._pieces(h))
        h.serial=next(self._serials); h.where=Where.ARRIVING
old=M.Mover.arrive
t0=time.perf_counter()
ps=[torch.randn(n,device='cuda',dtype=torch.bfloat16) for n in sizes()]
st=[torch.randn(n,device='cuda',dtype=torch.bfloat16) for n in sizes() for _ in range(2)]
nb=sum(t.nbytes for t in ps+st); print('bytes',nb/1e9,len(ps+st),flush=True)
chk=[t.view(torch.int16).sum(dtype=torch.int64) for t in ps+st]
torch.cuda.synchronize()
t0=time.perf_counter(); m=PhaseManager(torch.nn.Module(),extra={'p':ps,'s':st}); print('construct',time.perf_counter()-t0)
t0=time.perf_counter(); m.offload(); print('first offload s',time.perf_counter()-t0, nb/1e9/(time.perf_counter()-t0),'GB/s', m.transitions[-1], flush=True)
for name,fn in (('interleaved',old),('alloc first',first_alloc),('interleaved',old),('alloc first',first_alloc)):
    M.Mover.arrive=fn
    for i in range(3):
        torch.cuda.synchronize(); t0=time.perf_counter(); h=m.onload(wait=False); t1=time.perf_counter(); h.wait(); t2=time.perf_counter()
        torch.cuda.synchronize(); t3=time.perf_counter(); h=m.offload(wait=False); t4=time.perf_counter(); h.wait(); t5=time.perf_counter()
        print(name,'onload call ms',round(1e3*(t1-t0),1),'total',round(1e3*(t2-t0),1),'GB/s',round(nb/1e9/(t2-t0),1),'| offload call',round(1e3*(t4-t3),1),'total',round(1e3*(t5-t3),1),'GB/s',round(nb/1e9/(t5-t3),1), 'moved s', round(m.transitions[-1].seconds,4), flush=True)
m.onload()
print('equal',all(int(a)==int(t.view(torch.int16).sum(dtype=torch.int64)) for a,t in zip(chk,ps+st)))
h=torch.empty(2<<30,dtype=torch.uint8,pin_memory=True); d=torch.empty(2<<30,dtype=torch.uint8,device='cuda')
for a,b,n in ((h,d,'d2h'),(d,h,'h2d')):
    torch.cuda.synchronize(); t=time.perf_counter()
    for _ in range(3): a.copy_(b,non_blocking=True)
    torch.cuda.synchronize(); print(n,3*(2<<30)/1e9/(time.perf_counter()-t))
print(m.image.reserved_bytes/nb)
