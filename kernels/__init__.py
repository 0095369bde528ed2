"""The operations that cost time: a plain reference, C++ for the CPU, Triton for the GPU.

A kernel knows arrays and nothing else. Each operation has a folder of its own. Every public
function takes `backend`: "reference", "cpu", "triton" or "auto". "auto" takes "cpu" for CPU tensors
and "triton" for CUDA tensors, and nothing slower by itself. `ecrm.kernels.dispatch.taken()` tells
what was taken.
"""
