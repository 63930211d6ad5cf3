"""Benchmarks of a training step: time, memory and numerical error, next to torch's and other libraries' optimizers.

tasks          networks and the batches they are trained on
methods, peers the optimizers that are timed: this library's and torch's, and those of other libraries
agreement      the first update of every method in float64, to measure numerical error against
measure, memory, labels   time, peak memory, and time by part of a step
kfac_step, shampoo_step, conv, roots, sweep   one benchmark per file
result         the stored numbers; drawing and page read nothing else
stability      do runs stay stable with stale inverses, averaged factors, zero gates and fitted data?
"""
