"""Tool calls: the definitions in a request, the format of each family, and the readers of answers."""
