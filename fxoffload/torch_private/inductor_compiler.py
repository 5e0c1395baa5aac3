"""Private torch APIs of Inductor: its compiler, which takes 0.7 s of CPU time to import. ``import fxoffload`` does not
read this file."""

from torch._inductor.async_compile import AsyncCompile as AsyncCompile
from torch._inductor.codecache import CodeCacheFuture as CodeCacheFuture
from torch._inductor.codecache import FxGraphCache as FxGraphCache
from torch._inductor.compile_fx import compile_fx as compile_fx
from torch._inductor.compile_fx import compile_fx_inner as compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch._inductor.triton_bundler import TritonBundler as TritonBundler
