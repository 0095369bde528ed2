"""The operations that cost time, one folder each: plain reference, C++ for the CPU, Triton for the GPU.

A kernel knows arrays and nothing else. Every public function takes `backend`: "reference", "cpu",
"triton", or "auto", which takes "cpu" for CPU tensors and "triton" for CUDA tensors and never
anything slower on its own; `ecrm.kernels.dispatch.taken()` tells what was taken.
"""
