"""Benchmarks that anybody can run: what a step costs, beside torch's own optimizers and other libraries'.

tasks -> networks and their data;  methods, peers -> what trains them;  agreement -> a float64 truth for each;
measure, memory, labels -> numbers;  kfac_step, shampoo_step, conv, roots -> one benchmark a file;
result -> what is kept;  drawing, page -> made of what is kept, and of nothing else.
"""
