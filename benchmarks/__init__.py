"""Measurements of jaxengine, one script a question; see docs/benchmarks.md."""
