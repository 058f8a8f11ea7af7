"""What a GPU would compile: the variants of each Triton kernel, from the tables of blocks of its launches.

kernel file of weft --> of_<its name>() --> Compilation: signature, constants --> ``compile_gate``
"""
