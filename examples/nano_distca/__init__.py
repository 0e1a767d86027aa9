"""Core attention disaggregation (arXiv 2510.18121) in one sitting: small, whole, and on a CPU.

Core attention, ``softmax(Q K^T / sqrt(d)) V``, has no weights and no state, and is quadratic in the
length of a document; everything else in a transformer is linear in tokens. So ranks with equal
tokens take unequal times, and core attention alone can be cut up and computed anywhere. Read on in
this order; each file is one idea:

1. ``documents``: packed rows of documents, some of which span ranks
2. ``tasks``: ranges of queries with all of their keys, their seconds and their bytes
3. ``plan``: servers balanced within a tolerance, by moving parts of documents for few bytes
4. ``route``: the rows that travel follow from the plan; nobody sends them
5. ``kernel``: forward and backward of a task
6. ``wire``: messages between processes, over gloo
7. ``exchange``: a tick, rows out and results back, also when a server dies
8. ``lanes``: two nano-batches take turns, and one computes while the other's rows travel
9. ``job``: processes, and the control plane that decides who is alive

``reference`` is the same model with plain attention. ``python -m examples.nano_distca`` runs all of
it; ``nano_distca.ipynb`` draws it with ``figures``.
"""
