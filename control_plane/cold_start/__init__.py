"""Planners that plan from the first second on, also where they have to be compiled first.

On a machine's first use of a planner, compiling it takes a minute. A process of its own does that,
into numba's cache; until then another one runs the same planner uncompiled: the same plans, to the
bit, a hundred times slower. Where that takes too long, documents are left at home.
"""
