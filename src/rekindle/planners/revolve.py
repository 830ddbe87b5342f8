"""Revolve: optimal checkpoints on a homogeneous chain (Griewank and Walther, TOMS 2000).

To run l steps forward and then to visit their values in reverse with s slots for values,

    P(0, s) = 0,    P(l, s) = min over 1 <= j <= l of  j + P(l - j, s - 1) + P(j - 1, s):

advance to value j and keep it, reverse what comes after it with one slot less, and then, with its
slot free again, what comes before. The value before the first one needs no slot: it is the input.
With r the least number such that C(s + r, s) > l this is the binomial formula

    P(l, s) = (r + 1) (l + 1) - C(s + r + 1, s + 1) ... see `forwards`, where it is derived.

In a chain of equal values a saved value stays until its backward step has used it (persistence;
Griewank 1992), so P is the optimum of all schedules and its cost is a proven bound.
"""
