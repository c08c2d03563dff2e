"""What is static about a kernel, and how it is launched: pure choices by rules, which need nothing but Python.

| module | concern |
|---|---|
| ``problem`` | a product of the Hopper core with what follows it |
| ``tiles`` | how it is cut into tiles and spread over blocks |
| ``launches`` | launches for few rows and for many |
| ``dense`` | the kernel of a dense operation: operands, product, order of arguments |
| ``expand``, ``convert`` | passes that bring operands into the form that the core takes |
| ``swiglu_backward``, ``proj_rope``, ``mhc`` | the operations of these names |
| ``small_m``, ``scaled_few_rows`` | block-scaled products with few rows |
"""
