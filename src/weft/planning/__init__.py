"""What a model costs in memory before it is bought: pure arithmetic over ``config.json``.

    geometries   public models by name -> config.json     ranks     one device's share under --tp
    weights      parameters and bytes                     layouts   the same bytes as others cut them
    model_plan   all of it put together: what fits        report    the plan as plain data

weft's own figures come from ``memory.plan``, the code that allocates: there is no second formula for them.
"""
