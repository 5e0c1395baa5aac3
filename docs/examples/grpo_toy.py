"""Trains a tiny Qwen3 to add two digits by GRPO, with the rollout engine and the training on one device.

    python docs/examples/grpo_toy.py [STEPS]

A step has the four phases of the large frameworks:

    sync: the policy's weights go to the engine, a second copy of the model;
    rollout: the engine samples a group of answers to each question;
    logprob: the policy computes the log-probs of these answers;
    train: it learns from them.

Tensors that a phase does not need are on the host meanwhile; a table shows the bytes that are really on the device.
Without a GPU this is a rehearsal: "the device" is the CPU, and the bytes move all the same.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from fxoffload.phases import PhaseManager
from fxoffload.sizes import format_bytes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COMPILE: dict[str, Any] = {"policy": "offload_all", "min_bytes": 1}
if DEVICE.type == "cpu":
    COMPILE |= {"device_types": ("cpu",), "inner": "aot_eager"}

TOKENS = "0123456789+=.P"  # "." ends an answer, "P" pads
END, PAD = TOKENS.index("."), TOKENS.index("P")
QUESTIONS = [f"{a}+{b}=" for a in range(5) for b in range(5)]
QUESTION, ANSWER = 4, 2  # tokens: a digit and the end
GROUP = 16  # answers to each question
EPOCHS = 2  # optimizer steps on the same answers
CLIP = 0.2


def encode(texts: list[str]) -> Tensor:
    return torch.tensor([[TOKENS.index(c) for c in text] for text in texts], device=DEVICE)


def decode(tokens: Tensor) -> list[str]:
    return ["".join(TOKENS[i] for i in row) for row in tokens.tolist()]


def reward(question: str, answer: str) -> float:
    """0.8 for the right digit, 0.1 for its neighbours, and 0.2 for saying no more than a digit."""
    digit, end = answer
    if not digit.isdigit():
        return 0.0
    off = abs(int(digit) - int(question[0]) - int(question[2]))
    return {0: 0.8, 1: 0.1}.get(off, 0.0) + 0.2 * (end == TOKENS[END])


def advantages(rewards: Tensor) -> Tensor:
    """How much better an answer is than the others to the same question."""
    groups = rewards.view(-1, GROUP)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def make_model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        bos_token_id=PAD,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    model = Qwen3ForCausalLM(config)
    nn.Module.to(model, DEVICE)
    return model


def generate(engine: Qwen3ForCausalLM, questions: Tensor) -> Tensor:
    """Questions and sampled answers, padded to one length."""
    mask = torch.ones_like(questions)
    tokens = engine.generate(questions, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=ANSWER)  # type: ignore[operator]
    return F.pad(tokens, (0, QUESTION + ANSWER - tokens.shape[1]), value=PAD)


def log_probs(model: Callable[..., Any], tokens: Tensor) -> Tensor:
    """Of each token of the answers; 0 after the end."""
    answers = tokens[:, QUESTION:]
    logits = model(input_ids=tokens, use_cache=False).logits[:, QUESTION - 1 : -1]
    losses = F.cross_entropy(logits.flatten(0, 1).float(), answers.flatten(), reduction="none")
    return -losses.view_as(answers) * (answers != PAD)


@dataclass
class Ledger:
    """Seconds and bytes on the device of each phase."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    on_device: dict[str, dict[str, int]] = field(default_factory=dict)
    storages: dict[str, list[torch.UntypedStorage]] = field(default_factory=dict)

    def watch(self, name: str, tensors: list[Tensor]) -> None:
        """Tensors that are on the device now. A storage that is emptied later has 0 bytes."""
        self.storages[name] = [tensor.untyped_storage() for tensor in tensors]

    @contextmanager
    def phase(self, manager: PhaseManager, name: str, then: str | None = None) -> Iterator[None]:
        """A phase of the manager, with the time that it takes to enter it."""
        start = time.perf_counter()
        with manager.phase(name, then):
            yield
            self.on_device[name] = {who: sum(s.nbytes() for s in found) for who, found in self.storages.items()}
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)


class Loop:
    """A policy that learns and an engine that answers, which take turns on the device."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.policy, self.engine = make_model(), make_model().eval()
        self.compiled = torch.compile(self.policy, backend="fxoffload", options=COMPILE)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-3, weight_decay=0.0)
        self.training = PhaseManager(self.policy, self.optimizer, device_types=(DEVICE.type,))
        self.serving = PhaseManager(self.engine, device_types=(DEVICE.type,))
        self.ledger = Ledger()
        self.ledger.watch("policy", list(self.policy.parameters()))
        self.ledger.watch("engine", list(self.engine.parameters()))

    def step(self) -> float:
        """One step of GRPO. Returns the mean reward of its answers."""
        self.sync()
        tokens, rewards = self.rollout()
        old = self.logprob(tokens)
        self.train(tokens, advantages(rewards).to(DEVICE), old)
        return rewards.mean().item()

    @torch.no_grad()
    def sync(self) -> None:
        with self.ledger.phase(self.training, "sync", then="rollout"):
            self.serving.onload()
            weights = self.engine.state_dict()
            for name, weight in self.training.stream_weights():
                weights[name].copy_(weight)

    def rollout(self) -> tuple[Tensor, Tensor]:
        with self.ledger.phase(self.training, "rollout"):
            questions = [question for question in QUESTIONS for _ in range(GROUP)]
            tokens = generate(self.engine, encode(questions))
            answers = decode(tokens[:, QUESTION:])
            rewards = torch.tensor([reward(*pair) for pair in zip(questions, answers, strict=True)])
        self.serving.offload()
        return tokens, rewards

    @torch.no_grad()
    def logprob(self, tokens: Tensor) -> Tensor:
        with self.ledger.phase(self.training, "logprob"):
            return log_probs(self.compiled, tokens)

    def train(self, tokens: Tensor, advantage: Tensor, old: Tensor) -> None:
        with self.ledger.phase(self.training, "train", then="sync"):
            for _ in range(EPOCHS):
                ratio = (log_probs(self.compiled, tokens) - old).exp()
                gain = torch.minimum(ratio * advantage[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantage[:, None])
                (-gain.mean()).backward()
                nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            tensors = [tensor for values in self.optimizer.state.values() for tensor in values.values()]
            self.ledger.watch("optimizer", [tensor for tensor in tensors if tensor.device.type == DEVICE.type])


def main(steps: int) -> None:
    where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU rehearsal: no time or memory claims"
    print(f"GRPO, torch {torch.__version__}, {where}; {len(QUESTIONS)} questions, {GROUP} answers to each")
    loop = Loop()
    rewards = [loop.step() for _ in range(steps)]
    seconds = loop.ledger.seconds
    shown = sorted({*range(0, steps, max(steps // 10, 1)), steps - 1})
    rows = [[step, f"{rewards[step]:.3f}", *(f"{s[step]:.3f}" for s in seconds.values())] for step in shown]
    print(tabulate(rows, headers=["step", "reward", *(f"{name}, s" for name in seconds)], disable_numparse=True))
    print()
    owners = list(loop.ledger.storages)
    bytes_rows = [
        [name, f"{statistics.median(seconds[name]):.3f}", *(format_bytes(found.get(who, 0)) for who in owners)]
        for name, found in loop.ledger.on_device.items()
    ]
    print(tabulate(bytes_rows, headers=["phase", "seconds (median)", *owners], disable_numparse=True))
    print()
    print(tabulate(sorted(loop.training.metrics().items()), headers=["metric", "value"], floatfmt=".6g"))
    first, last = statistics.mean(rewards[:5]), statistics.mean(rewards[-5:])
    print(f"\nreward of the first 5 steps: {first:.3f}, of the last 5: {last:.3f}")
    loop.training.close()
    loop.serving.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
