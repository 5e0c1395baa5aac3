"""The peers as data: what each variant is, which API it calls, which options it takes. Nothing here imports torch."""

from dataclasses import dataclass

PATH = "path"


@dataclass(frozen=True)
class Peer:
    """A way to save fewer activations.

    Attributes:
        says: what runs, and through which API.
        compiled: by Inductor as a whole; else it runs eagerly, with the kernels of the variant ``eager``.
        checkpointed: with Hugging Face's non-reentrant checkpointing of every layer.
        options: names that may follow ``@``; the peer's own, and ``path``: a checkout of its repository.
        checkout: the setting of ``--set`` that gives that checkout to all its variants.
        sharded: under FSDP2, on one rank in ``activations``, on all in ``fsdp``.
        alone: changes the model for good, so that nothing else runs in its process: ``max-seq`` gives it processes of
            its own, the other sweeps refuse it.
    """

    says: str
    compiled: bool = False
    checkpointed: bool = False
    options: tuple[str, ...] = ()
    checkout: str = ""
    sharded: bool = False
    alone: bool = False


_TRL = ("use_pin_memory", "use_streams", "min_offload_size", "max_fwd_stash_size", PATH)
_STREAMS = ("activation_offload_separate_stream", "activation_offload_sink_wait", "activation_reload_prefetch")

PEERS: dict[str, Peer] = {
    "eager_checkpoint": Peer("eager, gradient_checkpointing_enable(use_reentrant=False)", checkpointed=True),
    "save_on_cpu": Peer(
        "eager, torch.autograd.graph.save_on_cpu(pin_memory=True) around the step", options=("pin_memory",)
    ),
    "torch_offload": Peer(
        "Inductor, torch._functorch.config.enable_activation_offloading on the compute stream; every saved value that "
        "it takes and that has min_bytes is tagged",
        compiled=True,
        options=("min_bytes",),
    ),
    "torch_offload_streams": Peer(
        "as torch_offload, on a stream of its own: activation_offload_separate_stream, sink_wait and reload_prefetch",
        compiled=True,
        options=("min_bytes", *_STREAMS),
    ),
    "trl": Peer(
        "eager, trl.models.activation_offloading.get_act_offloading_ctx_manager(model) around the step, as SFT does",
        options=_TRL,
        checkout="trl",
        alone=True,
    ),
    "trl_checkpoint": Peer(
        "trl with Hugging Face's checkpointing, TRL's default pair",
        checkpointed=True,
        options=_TRL,
        checkout="trl",
        alone=True,
    ),
    "eager_fsdp": Peer(
        "eager under FSDP2 on one rank: what verl's variants are compared with", sharded=True, alone=True
    ),
    "verl": Peer(
        'eager under FSDP2 on one rank, verl.utils.activation_offload.enable_activation_offloading(model, "fsdp2")',
        options=(PATH,),
        checkout="verl",
        sharded=True,
        alone=True,
    ),
    "verl_checkpoint": Peer(
        "verl with enable_ckpt=True: its own reentrant checkpoint of every layer, whose inputs are offloaded",
        options=(PATH,),
        checkout="verl",
        sharded=True,
        alone=True,
    ),
    "titan": Peer(
        "torchtitan's graph_trainer: forward and backward in one make_fx graph, its offload passes, then Inductor",
        compiled=True,
        options=("cpu_budget_gb", "inductor", PATH),
        checkout="titan",
        alone=True,
    ),
}
CHECKOUTS = tuple(dict.fromkeys(peer.checkout for peer in PEERS.values() if peer.checkout))
_EAGER_KINDS = ("eager", *(name for name, peer in PEERS.items() if not peer.compiled))


def runs_eagerly(kind: str) -> bool:
    """Whether a variant runs the kernels of ``eager``, so that its gradients should be those."""
    return kind in _EAGER_KINDS


def is_checkpointed(kind: str) -> bool:
    """Whether Hugging Face's checkpointing is on."""
    return kind == "checkpoint" or (kind in PEERS and PEERS[kind].checkpointed)


def is_sharded(kind: str) -> bool:
    """Whether the variant brings its own FSDP2."""
    return kind in PEERS and PEERS[kind].sharded


def is_alone(kind: str) -> bool:
    """Whether nothing else may run in a process that runs the variant."""
    return kind in PEERS and PEERS[kind].alone
