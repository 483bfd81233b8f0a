"""`testbed doctor` on the real backend: packages, GPUs and machines are made up, nothing of it need be installed."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from testbed.cli import main
from testbed.commands import real_parts
from tests.cli.conftest import Cli, read_json

ROOT = Path(__file__).parents[2]
LEARNER = {name: "1.2.3" for name in real_parts.LEARNER}
ON_CPU = {"sglang": "0.5.23", "sglang-cpu-shim": "0.1.0", **LEARNER}
ON_GPU = {"sglang": "0.5.23", "sglang-kernel": "0.4.10", **LEARNER}
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Sets which packages there are, what nvidia-smi prints (None: there is none) and for what CUDA torch was built."""

    def make(
        packages: Mapping[str, str], smi: str | None = None, cuda: str | None = None, python: tuple[int, int] = (3, 11)
    ) -> None:
        def version(name: str) -> str:
            if name not in packages:
                raise PackageNotFoundError(name)
            return packages[name]

        torch = tmp_path / "torch"
        torch.mkdir()
        value = "None" if cuda is None else repr(cuda)
        (torch / "version.py").write_text(f"__version__ = '2.13.0'\ncuda: Optional[str] = {value}\nhip = None\n")
        spec = SimpleNamespace(origin=str(torch / "__init__.py")) if "torch" in packages else None
        monkeypatch.setattr(real_parts, "version", version)
        monkeypatch.setattr(real_parts, "find_spec", lambda name: spec if name == "torch" else find_spec(name))
        monkeypatch.setattr(real_parts, "sys", SimpleNamespace(version_info=(*python, 4)))
        monkeypatch.setattr(platform, "system", lambda: "Linux")
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        monkeypatch.setattr(platform, "python_version", lambda: "{}.{}.4".format(*python))
        tools = tmp_path / "bin"
        tools.mkdir()
        if smi is not None:
            (tools / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
            (tools / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tools}:/bin:/usr/bin" if smi is not None else str(tools))

    return make


H200 = "echo 'NVIDIA H200, 143771, 143000'; echo 'NVIDIA H200, 143771, 1000'"


def test_all_there_on_a_cpu(cli: Cli, tmp_path: Path, machine: Machine) -> None:
    machine(ON_CPU)
    said = cli("doctor", "--json", "f.json")
    figures = read_json(tmp_path / "f.json")["real"]
    assert (said.code, said.err) == (0, "")
    assert "real backend: ready" in said.out.splitlines()
    assert figures["missing"] == real_parts.missing_for_real() == []
    assert (figures["device"], figures["gpus"], figures["torch_cuda"], figures["error"]) == ("cpu", [], None, None)
    assert "sgl_kernel: a stand-in for machines without a GPU (sglang-cpu-shim 0.1.0)" in said.out
    assert "torch 1.2.3 (CPU)" in said.out and "no GPU" in said.out


def test_nothing_there(cli: Cli, machine: Machine) -> None:
    machine({})
    said = cli("doctor")
    (line,) = (line for line in said.out.splitlines() if line.startswith("real backend: "))
    assert said.code == 0, "the simulator does not need it"
    assert line.startswith("real backend: MISSING sglang 0.5.23, torch, ")
    assert line.endswith("sgl_kernel (sglang-cpu-shim): make install-real")


def test_another_sglang_is_named(machine: Machine) -> None:
    machine({**ON_CPU, "sglang": "0.5.22"})
    assert real_parts.missing_for_real() == ["sglang 0.5.23 (0.5.22 is installed)"]


def test_all_there_beside_gpus(cli: Cli, tmp_path: Path, machine: Machine) -> None:
    machine(ON_GPU, H200, cuda="13.0")
    said = cli("doctor", "--json", "f.json")
    figures = read_json(tmp_path / "f.json")["real"]
    assert (said.code, figures["missing"], figures["device"]) == (0, [], "cuda")
    assert "  GPU 1: NVIDIA H200, 1 of 151 GB free" in said.out.splitlines()  # 143771 MiB are 150.8 GB
    assert "torch 1.2.3 (CUDA 13.0)" in said.out and "sgl_kernel: kernels (sglang-kernel 0.4.10)" in said.out


def test_the_stand_in_beside_a_gpu_is_an_error(cli: Cli, machine: Machine) -> None:
    machine({**ON_GPU, "sglang-cpu-shim": "0.1.0"}, H200, cuda="13.0")
    said = cli("doctor")
    assert said.code == 1
    assert "never install it there, it owns the module name sgl_kernel" in said.out
    assert real_parts.missing_for_real() == ["sgl_kernel of sglang-kernel in place of sglang-cpu-shim"]


def test_torch_without_cuda_beside_a_gpu(machine: Machine) -> None:
    machine(ON_GPU, H200)
    assert real_parts.missing_for_real() == ["torch with CUDA (1.2.3 is installed)"]


def test_an_nvidia_smi_that_fails_is_no_gpu(machine: Machine) -> None:
    machine(ON_CPU, "echo 'no devices were found'; exit 6")
    assert real_parts.missing_for_real() == []


def test_without_a_gpu_another_python_is_refused(machine: Machine) -> None:
    machine(ON_CPU, python=(3, 12))
    (lacking,) = real_parts.missing_for_real()
    assert lacking == "a GPU, or Python 3.11 on Linux x86-64 (this is Python 3.12.4 on Linux x86_64)"
    assert real_parts.how_to_get_real() == "make PYTHON=python3.11 VENV=.venv311 install-real"


def test_kernels_of_engines_in_another_environment_are_not_asked_for(machine: Machine) -> None:
    machine({"sglang": "0.5.23", **LEARNER}, H200, cuda="13.0")
    assert real_parts.missing_for_real() == ["sgl_kernel of sglang-kernel"]
    assert real_parts.missing_for_real(engine_command=["/opt/engines/bin/python", "-m", "sglang.launch_server"]) == []


@pytest.mark.parametrize("smi", [None, H200], ids=["cpu", "gpu"])
def test_an_installed_package_is_told_pip(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, smi: str | None
) -> None:
    machine({}, smi)
    monkeypatch.setattr(real_parts, "__file__", str(tmp_path / "site-packages/testbed/commands/real_parts.py"))
    command = real_parts.how_to_get_real()
    if smi:
        assert command == "pip install 'rl-testbed[gpu]'"
    else:
        first, second = command.split(" && ")
        assert first == "pip install 'rl-testbed[real]'"
        assert second.startswith("pip install --no-deps sglang==0.5.23 triton==")
        assert (Path(second.split()[-1]) / "pyproject.toml").is_file(), "the stand-in's folder"


def pins(text: str) -> dict[str, str]:
    """Package -> version, of the lines `package==version`."""
    found = re.findall(r"^([\w.-]+)(?:\[[\w,-]+\])?==(\S+)$", text, re.M)
    return {name.lower().replace("_", "-"): version for name, version in found}


def test_one_version_of_a_package_in_all_locks() -> None:
    base, dev, real = (
        pins((ROOT / f"requirements{which}.lock").read_text(encoding="utf-8")) for which in ("", "-dev", "-real")
    )
    assert base and base.items() <= dev.items() and base.items() <= real.items()
    assert {name for name in dev.keys() & real.keys() if dev[name] != real[name]} == set()


def test_the_locks_have_what_the_extra_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lock = (ROOT / "requirements-real.lock").read_text(encoding="utf-8")
    extra = project["optional-dependencies"]["real"]
    assert pins("\n".join(extra)).items() <= pins(lock).items()
    assert len(pins("\n".join(extra))) == len(extra), "all of them pinned"


def test_packages_without_their_requirements_are_named_once() -> None:
    listed = pins((ROOT / "requirements-real-nodeps.txt").read_text(encoding="utf-8"))
    assert listed == pins("\n".join(real_parts.NO_DEPS))
    assert not listed.keys() & pins((ROOT / "requirements-real.lock").read_text(encoding="utf-8")).keys()


def test_doctor_imports_nothing_of_the_real_backend() -> None:
    heavy = ("torch", "sglang", "sgl_kernel", "ray", "transformers", "real")
    code = (
        "import sys\nfrom testbed.cli import main\n"
        "try: main(['doctor'])\nexcept SystemExit: pass\n"
        f"print([m for m in {heavy!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_real_run_without_the_extra_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Whatever is installed here: what is missing, and the command that gets it."""
    monkeypatch.setattr(real_parts, "missing_for_real", lambda command: ["torch 2.13.0", "sglang 0.5.23"])
    study = Path(__file__).parents[2] / "scenarios" / "examples" / "real_arithmetic.yaml"
    for command in (["real", str(study)], ["compare", str(study), "--backend", "real"]):
        with pytest.raises(SystemExit) as stop:
            main([*command, "--out", str(tmp_path / "out")])
        assert stop.value.code == 2
        said = capsys.readouterr().err
        assert "the real backend needs torch 2.13.0, sglang 0.5.23" in said and "install" in said
    with pytest.raises(SystemExit) as stop:
        main(["compare", str(study), "--backend", "reel"])
    assert stop.value.code == 2 and "(nearest: --backend real)" in capsys.readouterr().err
