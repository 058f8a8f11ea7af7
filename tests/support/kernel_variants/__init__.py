"""The variants of each Triton kernel that a GPU would compile, from the tables of blocks of its launches.

kernel file of weft --> of_<its name>() --> Compilation: signature, constants --> ``compile_gate``
"""
