"""Do the tests notice a change of the code? (``make mutants``; not a part of CI; docs/testing.md says how to read it.)

sample.py     a seeded choice of mutants: places of the code that the operators of Cosmic Ray can change
switches.py   all mutants compiled into one copy of the tree, each behind a switch in a shared file
worker.py     one pytest that has collected the tests, and forks for each mutant; results in a file
equivalent.py mutants that no test can notice, with the reason
__main__.py   arguments, stages, and the table by folder
"""
