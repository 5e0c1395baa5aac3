"""A checksum of every tensor as the layout of one tensor per expert would hold it, whatever the layout on the disk.

Two checkpoints of the same weights have the same checksums. This is the proof that a conversion changed nothing, so it
takes nothing from the plan: it reads a part of a stored tensor and cuts it with array indexing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from fxoffload.checkpoints.expert_keys import Stored
from fxoffload.checkpoints.families import Family, Projection
from fxoffload.checkpoints.header import DTYPE_BITS, StoredTensor
from fxoffload.checkpoints.layouts import Experts, LayoutBlock
from fxoffload.checkpoints.move_bytes import BUFFER_BYTES, OpenFiles, read_fully

Report = Callable[[int], None]


def checksums(experts: Experts, workers: int, report: Report) -> dict[str, str]:
    """For every tensor, by its name in the layout of one tensor per expert: dtype, shape and sha256.

    ``report`` is called with the bytes read, from several threads.
    """
    files = OpenFiles()
    try:
        with ThreadPoolExecutor(workers) as pool:
            # result() raises a failure; jobs that are still queued are cancelled.
            futures = [pool.submit(job) for job in _jobs(experts, files, report)]
            try:
                return {name: text for future in futures for name, text in future.result()}
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    finally:
        files.close()


Job = Callable[[], list[tuple[str, str]]]


def _jobs(experts: Experts, files: OpenFiles, report: Report) -> Iterator[Job]:
    for tensor in experts.others.values():
        yield partial(_whole, tensor.name, tensor, files, report)
    for block in experts.blocks.values():
        for (stored, parameter), tensors in block.tensors.items():
            for expert, tensor in tensors.items():
                if expert is not None and stored != "gate_up":
                    name = block.single_name(experts.family, expert, stored, parameter)
                    yield partial(_whole, name, tensor, files, report)
                else:
                    for number in range(tensor.shape[0]):
                        yield partial(_part, experts.family, block, stored, parameter, tensor, number, files, report)


def _whole(name: str, tensor: StoredTensor, files: OpenFiles, report: Report) -> list[tuple[str, str]]:
    digest = hashlib.sha256()
    file, end = files.open(tensor.path), tensor.offset + tensor.num_bytes
    buffer = memoryview(bytearray(min(BUFFER_BYTES, tensor.num_bytes)))
    for offset in range(tensor.offset, end, BUFFER_BYTES):
        view = buffer[: min(BUFFER_BYTES, end - offset)]
        read_fully(file, view, offset)
        digest.update(view)
        report(len(view))
    return [(name, _text(tensor.dtype, tensor.shape, digest))]


def _part(
    family: Family,
    block: LayoutBlock,
    stored: Stored,
    parameter: str,
    tensor: StoredTensor,
    number: int,
    files: OpenFiles,
    report: Report,
) -> list[tuple[str, str]]:
    """The checksums of one expert's part of a tensor that all experts share."""
    shape = tensor.shape[1:]
    size = tensor.num_bytes // tensor.shape[0]
    data = np.empty(size, dtype=np.uint8)
    read_fully(files.open(tensor.path), memoryview(data.data), tensor.offset + number * size)
    report(size)
    array = data.view(f"V{DTYPE_BITS[tensor.dtype] // 8}").reshape(shape)
    found = []
    for projection, matrix in _matrices(array, stored, block.form):
        name = block.single_name(family, number, projection, parameter)
        content = np.ascontiguousarray(matrix).reshape(-1).view(np.uint8)
        found.append((name, _text(tensor.dtype, matrix.shape, hashlib.sha256(content.data))))
    return found


def _matrices(array: np.ndarray, stored: Stored, form: str | None) -> list[tuple[Projection, np.ndarray]]:
    if stored != "gate_up":
        return [(stored, array if form in (None, "concatenated") else array.T)]
    half = array.shape[0 if form == "concatenated" else -1] // 2
    if form == "concatenated":
        return [("gate", array[:half]), ("up", array[half:])]
    if form == "transposed":
        return [("gate", array[..., :half].T), ("up", array[..., half:].T)]
    return [("gate", array[..., ::2].T), ("up", array[..., 1::2].T)]


def _text(dtype: str, shape: tuple[int, ...], digest: hashlib._Hash) -> str:
    return f"{dtype} {list(shape)} sha256:{digest.hexdigest()}"
