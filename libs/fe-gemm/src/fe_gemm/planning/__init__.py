"""What is static about a kernel, and how it is launched: pure choices by rules, which need nothing but Python.

| module | concern |
|---|---|
| ``problem`` | a product of the Hopper core with what follows it |
| ``tiles`` | how it is cut into tiles and spread over blocks |
| ``launches`` | launches for few rows and for many |
| ``dense`` | the kernel of a dense operation: operands, product, order of arguments |
| ``expand``, ``convert`` | passes that bring operands into the form that the core takes |
| ``grouped`` | products of groups of rows with their experts' weights, and what is made of them |
| ``grouped_wgrad`` | gradients of experts' weights |
| ``swiglu_backward``, ``proj_rope``, ``mhc`` | the operations of these names |
| ``few_rows`` | which kernels serve few rows of block-scaled operands, and who finishes their sums |
| ``small_m``, ``scaled_few_rows`` | these kernels |
"""
