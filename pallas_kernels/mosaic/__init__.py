"""Kernels for NVIDIA GPUs from Hopper on, written with Pallas Mosaic GPU; imported when one is first used."""
