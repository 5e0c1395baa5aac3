"""Where the first call's time went, from Dynamo's own timers."""

import torch._dynamo.utils as dynamo_utils

from benchmarks.schema import Result

# Dynamo, AOT joint graph, partition or Inductor? The timers nest (each of the first three contains what follows), and
# compile_file runs in parallel workers, so shares do not add up to one.
TIMERS = {
    "all": "_compile.compile_inner",
    "backend": "OutputGraph.call_user_compiler",
    "aot_autograd": "create_aot_dispatcher_function",
    "dynamo_tracing": "bytecode_tracing",
    "aot_metadata": "aot_collect_metadata",
    "aot_joint_trace": "aot_trace_joint_graph",
    "joint_passes": "_recursive_joint_graph_passes",
    "partition": "min_cut_rematerialization_partition",
    "inductor": "compile_fx_inner",
    "inductor_lowering": "GraphLowering.run",
    "inductor_codegen": "GraphLowering.codegen",
    "kernel_wait": "async_compile.wait",
    "lazy_backward": "backward._backward_impl",
}
LONGEST = 60
COUNTER_GROUPS = ("stats", "frames", "graph_break", "aot_autograd", "inductor")


def read_compile_times(result: Result) -> None:
    """Seconds by timer, shares of the first call, and Dynamo's counters."""
    metrics = dynamo_utils.compilation_time_metrics
    seconds = {name: sum(values) for name, values in metrics.items() if values}
    result.compile_times_s = dict(sorted(seconds.items(), key=lambda item: -item[1])[:LONGEST])
    if result.first_step_ms:
        total = result.first_step_ms / 1e3
        result.compile_shares = {k: round(seconds[name] / total, 4) for k, name in TIMERS.items() if name in seconds}
    for group in COUNTER_GROUPS:
        counted = dynamo_utils.counters.get(group)
        if counted:
            result.dynamo_counters[group] = {str(name): int(count) for name, count in counted.items()}
    result.num_graphs_first_step = count_graphs()


def count_graphs() -> int:
    """Graphs that Dynamo has compiled in this process: it must not grow after the first step."""
    return int(dynamo_utils.counters["stats"]["unique_graphs"])
