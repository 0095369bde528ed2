"""The operations that cost time: a plain reference, C++ for the CPU, Triton for the GPU.

A kernel knows arrays alone. Every operation has a folder. Every public function takes `backend`:
"reference", "cpu", "triton" or "auto". "auto" takes "cpu" for CPU tensors and "triton" for CUDA
tensors, and never falls back to a slower backend. `ecrm.kernels.dispatch.taken()` tells the backend
of the last call of every operation.
"""
