#!/usr/bin/env bash
# The real backend on this machine's GPU: what is installed, the contract suite, every weight path with every transition
# rule, and the demo, in under ten minutes on one H200-class GPU. Roles share the GPU (real.oversubscribe).
# `make gpu-check` sets up what it needs and runs it; figures are left in runs/gpu-check.
set -euo pipefail
cd "$(dirname "$0")/.."
nvidia-smi -L
export RL_TESTBED_RIG_DEVICE=cuda
testbed doctor
python -m pytest -x -q tests/real/whole_runs
testbed compare scenarios/examples/real_arithmetic.yaml --backend real --seeds 1 --out runs/gpu-check \
  --set cluster.gpu=H200 --set real.device=cuda --set real.oversubscribe=true --set rollout.engine.mem_fraction_static=0.2 \
  --json runs/gpu-check.json
