"""Measured serving points, simulated: a closed loop of clients before an engine model of SGLang or of vLLM."""
