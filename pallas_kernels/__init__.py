"""Attention kernels in Pallas for GPUs, with a plain JAX reference of each.

Empty so far: `jaxengine` attends through XLA on every platform. The kernels will be usable without
`jaxengine`, and neither they nor `onnx_import` will know the other.
"""
