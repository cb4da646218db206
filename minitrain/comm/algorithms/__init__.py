"""How collectives go about it: each algorithm a short generator, with its cost in its docstring.

Costs: α a message, β a byte sent, γ a byte reduced; V bytes in a rank's whole array, n ranks.
Thakur et al. is Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication
operations in MPICH".
"""
