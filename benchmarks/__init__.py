"""Benchmarks: ratios within one run on one machine; see docs/performance.md."""
