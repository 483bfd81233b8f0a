"""Speed and memory of the simulator, all features on. `python -m benchmarks --json benchmarks/results.json`."""
