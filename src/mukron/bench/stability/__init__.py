"""Does training stay stable with stale inverses, averaged factors, zero gates and fitted data?

networks   a small GPT, and a ResNet whose residual branches start at zero
text       a synthetic text for the GPT, drawn from a Markov chain of words
problems   what is trained: a network, data and a batch size
runs       one run of the matrix: what is passed to the optimizer, and what is measured
search     the learning rate that is best when inverses are refreshed at every step
rule       what "stable" means, fixed before results are seen
matrix     all runs, one after the other; those that are stored are not repeated
fitted     does a run that fits its data stay fitted?
result     the stored numbers and their tables; drawing and page read nothing else
"""
