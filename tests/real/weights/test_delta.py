"""Deltas and the node's copy: files only, no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from real.errors import RealError
from real.weights.checkpoint import check_whole, load_checkpoint, published, save_checkpoint
from real.weights.delta import PAYLOAD, DeltaRefused, DeltaReport, write_delta
from real.weights.node_copy import NodeCopy, version_folder

pytestmark = pytest.mark.backend("CORE")

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}
Tensors = dict[str, torch.Tensor]


def tensors(version: int, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Three tensors; from version to version one stays, one changes in 5 words, one everywhere."""
    generator = torch.Generator().manual_seed(7)
    made = {name: torch.randn(8, 6, generator=generator).to(dtype) for name in ("same", "few", "all")}
    for step in range(version):
        made["few"].view(-1)[step : step + 5] += 1
        made["all"] += 1
    return made


@pytest.fixture
def node(tmp_path: Path) -> NodeCopy:
    """Holds version 1."""
    copy = NodeCopy(tmp_path / "node")
    save_checkpoint(tmp_path / "full", tensors(1), CONFIG)
    copy.install(str(tmp_path / "full"), 1)
    return copy


def delta(folder: Path, base: int, version: int, encoding: Any = "xor") -> tuple[str, DeltaReport]:
    path = folder / f"delta-{base}-{version}-{encoding}"
    report = write_delta(path, tensors(base), tensors(version), base_version=base, version=version, encoding=encoding)
    return str(path), report


def held(node: NodeCopy, version: int) -> Tensors:
    path = node.path(version)
    assert path is not None
    return load_checkpoint(path, torch.bfloat16)


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("encoding", ("xor", "overwrite"))
def test_ws_12_a_delta_gives_the_next_version(node: NodeCopy, tmp_path: Path, encoding: str) -> None:
    path, report = delta(tmp_path, 1, 2, encoding)
    node.apply(path)
    assert node.current() == 2
    assert same(held(node, 2), tensors(2))
    assert same(held(node, 1), tensors(1))  # the version before stays for a restore
    assert (report.words, report.changed_words, report.full_bytes) == (3 * 48, 48 + 5, 2 * 3 * 48)


@pytest.mark.parametrize("encoding", ("xor", "overwrite"))
def test_ws_12_double_apply_is_refused(node: NodeCopy, tmp_path: Path, encoding: str) -> None:
    path, _ = delta(tmp_path, 1, 2, encoding)
    node.apply(path)
    with pytest.raises(DeltaRefused, match="version 2 is already here: a delta is applied once"):
        node.apply(path)
    assert same(held(node, 2), tensors(2))


@pytest.mark.parametrize("encoding", ("xor", "overwrite"))
def test_ws_12_wrong_base_is_refused(node: NodeCopy, tmp_path: Path, encoding: str) -> None:
    path, _ = delta(tmp_path, 2, 3, encoding)
    with pytest.raises(DeltaRefused, match="wrong base: version 1 is here, the delta starts from 2"):
        node.apply(path)
    assert node.current() == 1 and node.path(3) is None and same(held(node, 1), tensors(1))


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_ws_12_torn_and_corrupted_deltas_are_refused(node: NodeCopy, tmp_path: Path) -> None:
    for damage in (
        lambda f: (f / PAYLOAD).write_bytes((f / PAYLOAD).read_bytes()[:-3]),
        lambda f: flip(f / PAYLOAD, 20),
        lambda f: (f / PAYLOAD).unlink(),
        lambda f: (f / "manifest.json").write_text('{"version": 2'),
    ):
        path, _ = delta(tmp_path, 1, 2)
        damage(Path(path))
        with pytest.raises(DeltaRefused, match="torn delta"):
            node.apply(path)
        assert node.current() == 1 and node.path(2) is None and same(held(node, 1), tensors(1))
    node.apply(delta(tmp_path, 1, 2)[0])  # a whole one is still welcome
    assert same(held(node, 2), tensors(2))


def test_ws_12_a_corrupted_base_is_poisoned_until_a_full_copy(node: NodeCopy, tmp_path: Path) -> None:
    flip(version_folder(node.folder, 1) / "model.safetensors", -1)
    path, _ = delta(tmp_path, 1, 2)
    with pytest.raises(DeltaRefused, match=r"wrong base: .* is not version 1") as refused:
        node.apply(path)
    assert refused.value.poisoned
    again = NodeCopy(node.folder)  # after a restart too
    assert again.current() is None and again.path(1) is None
    with pytest.raises(DeltaRefused, match="a full copy is needed"):
        again.apply(path)
    save_checkpoint(tmp_path / "full2", tensors(2), CONFIG)
    again.install(str(tmp_path / "full2"), 2)
    assert again.current() == 2
    again.apply(delta(tmp_path, 2, 3)[0])
    assert same(held(again, 3), tensors(3))


def test_ws_12_a_result_with_a_wrong_checksum_is_not_published(node: NodeCopy, tmp_path: Path) -> None:
    """A delta whose payload belongs to another pair of versions: every part is whole, the result is not version 2."""
    path, _ = delta(tmp_path, 1, 2)
    other, _ = delta(tmp_path, 1, 3)
    manifest = (Path(path) / "manifest.json").read_text()
    import msgspec

    from real.weights.delta import Manifest

    right, wrong = (
        msgspec.json.decode(text, type=Manifest) for text in (manifest, (Path(other) / "manifest.json").read_text())
    )
    mixed = {n: msgspec.structs.replace(e, result=right.tensors[n].result) for n, e in wrong.tensors.items()}
    forged = msgspec.structs.replace(wrong, version=2, tensors=mixed)
    (Path(other) / "manifest.json").write_bytes(msgspec.json.encode(forged))
    with pytest.raises(DeltaRefused, match="is not version 2 after the delta"):
        node.apply(other)
    assert node.current() == 1 and node.path(2) is None


def test_a_forgotten_current_version_falls_back(node: NodeCopy, tmp_path: Path) -> None:
    node.apply(delta(tmp_path, 1, 2)[0])
    node.forget(2)
    assert node.current() == 1 and node.path(2) is None
    node.forget(1)
    assert node.current() is None and node.empty()


def test_deltas_need_versions_of_one_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="differ in names, shapes or dtypes"):
        write_delta(tmp_path / "d", tensors(1), tensors(1, torch.float32), base_version=1, version=2, encoding="xor")


def test_a_folder_is_published_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), published(tmp_path / "out") as temporary:
        (temporary / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_cut_checkpoint_is_recognised(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", tensors(0), CONFIG)
    check_whole(tmp_path / "c")
    file = tmp_path / "c" / "model.safetensors"
    whole = file.read_bytes()
    for cut, said in ((-1, "instead of"), (20, "header"), (4, "header")):
        file.write_bytes(whole[:cut])
        with pytest.raises(RealError, match=said):
            check_whole(tmp_path / "c")
    with pytest.raises(RealError, match="holds no"):
        check_whole(tmp_path / "empty")
