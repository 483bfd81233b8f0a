"""Starting and ending a server: what is refused before, what is said when it dies, and that nothing stays behind."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from real.engines.client import EngineClient
from real.engines.options import REPOSITORY, ServerOptions
from real.engines.server import EngineServer
from real.errors import EngineStartError, RealError

WAITS = (sys.executable, "-c", "import signal; signal.pause()")
"""A server that never serves."""


def test_options_reach_the_server(client: EngineClient, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
    info = run(client.get("/server_info"))
    want = {
        "device": "cpu",
        "max_total_tokens": 8192,
        "max_running_requests": 16,
        "context_length": 2048,
        "chunked_prefill_size": 2048,
        "max_prefill_tokens": 4096,
        "page_size": 1,
        "schedule_policy": "lpm",
        "schedule_conservativeness": 0.9,
        "mem_fraction_static": 0.5,
        "disable_overlap_schedule": True,
        "disable_radix_cache": False,
        "enable_return_routed_experts": True,
        "skip_tokenizer_init": True,
        "sleep_on_idle": True,
        "weight_version": "0",
        "custom_weight_loader": ["real.weights.engine_side.handle"],
    }
    assert {name: info[name] for name in want} == want


def test_on_a_gpu_device_and_attention_backend_are_left_to_sglang() -> None:
    options = ServerOptions("model", device="cuda", dtype="bfloat16", gpus=(2, 3), tp_size=2, port=30000)
    assert not {"--device", "--attention-backend", "--disable-cuda-graph"} & set(options.argv())
    assert options.env()["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "SGLANG_USE_CPU_ENGINE" not in options.env()
    own = ServerOptions("model", command=("/opt/sglang/bin/python", "-m", "sglang.launch_server"), extra_args=("--x",))
    assert own.argv()[:3] == ["/opt/sglang/bin/python", "-m", "sglang.launch_server"]
    assert own.argv()[-1] == "--x"


def test_a_model_path_that_is_no_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    with pytest.raises(RealError, match=r"nothing' does not exist: expected .*config\.json"):
        EngineServer.start(ServerOptions(str(tmp_path / "nothing")), log)
    with pytest.raises(RealError, match=r"has no config\.json"):
        EngineServer.start(ServerOptions(str(tmp_path)), log)
    assert not log.exists()


def test_more_gpus_than_there_are_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(RealError, match=r"wants GPUs \(97,\), but this machine has"):
        EngineServer.start(ServerOptions(str(tiny_model), device="cuda", gpus=(97,)), tmp_path / "log")
    with pytest.raises(RealError, match="tp_size 2 needs as many GPUs"):
        EngineServer.start(ServerOptions(str(tiny_model), device="cuda", gpus=(0,), tp_size=2), tmp_path / "log")


def test_a_taken_port_is_said_plainly(tiny_model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineStartError, match=f"port {port} of 127.0.0.1 is taken"):
            EngineServer.start(ServerOptions(str(tiny_model), port=port), tmp_path / "log")


def test_an_engine_that_dies_at_start_shows_its_last_log_lines(tiny_model: Path, tmp_path: Path) -> None:
    server = EngineServer.start(ServerOptions(str(tiny_model), extra_args=("--no-such-flag",)), tmp_path / "log")
    with pytest.raises(EngineStartError, match=r"(?s)ended with exit code 2.*Last lines of .*--no-such-flag"):
        server.wait_ready()
    assert not server.alive


def test_a_server_that_does_not_come_up_in_time_is_ended(tiny_model: Path, tmp_path: Path) -> None:
    server = EngineServer.start(ServerOptions(str(tiny_model), command=WAITS), tmp_path / "log")
    process = psutil.Process(server.pid)
    with pytest.raises(EngineStartError, match=r"did not serve within 0\.2 s"):
        server.wait_ready(0.2)
    assert not process.is_running()
    server.stop()


def test_two_servers_get_two_ports(tiny_model: Path, tmp_path: Path) -> None:
    options = ServerOptions(str(tiny_model), command=WAITS)
    servers = [EngineServer.start(options, tmp_path / str(i)) for i in range(2)]
    try:
        assert servers[0].url != servers[1].url
    finally:
        for server in servers:
            server.stop(grace_s=0)
    assert [server.alive for server in servers] == [False, False]


def test_a_server_dies_with_a_killed_parent(tiny_model: Path, tmp_path: Path) -> None:
    """The server's own process only; that SGLang's three follow is in test_cluster.py."""
    parent = f"""if True:
        import json, sys
        from real.engines.options import ServerOptions
        from real.engines.server import EngineServer
        server = EngineServer.start(ServerOptions({str(tiny_model)!r}, command={WAITS!r}), {str(tmp_path / "log")!r})
        print(json.dumps(server.pid), flush=True)
        sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY
    ) as process:
        assert process.stdout is not None
        server = psutil.Process(json.loads(process.stdout.readline()))
        process.kill()
    _, alive = psutil.wait_procs([server], timeout=30)
    assert not alive
