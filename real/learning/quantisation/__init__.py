"""Quantise and dequantise: what a low-precision format makes of a weight; one module per format.

The same functions run inside the engine (`real.weights.quantize`, on its own fused and sharded parameters) and in the
training forward (`forward`, on the same fused and sharded tensors rebuilt from the trainer's), so both sides hold the
same bits. Only weights: activations, KV cache and gradients keep the model's type."""
