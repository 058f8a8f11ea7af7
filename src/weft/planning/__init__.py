"""Memory that a model needs, before a GPU is bought: pure arithmetic over ``config.json``.

    geometries   public models by name -> config.json     model_plan   the plan of a model: how much fits
    weights      parameters and bytes                     report       the plan as plain data
    layouts      the same bytes in the layouts of other engines

One device's share under ``--tp`` is that of ``families.sharding``.

weft's own figures come from ``memory.plan``, the code that allocates: there is no second formula for them.
"""
