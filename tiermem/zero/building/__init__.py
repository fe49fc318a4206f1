"""Building: a model that may not fit, and modules that help it to.

admission    what a model may not hold              leaf         modules fetched as one
nursery      parameters of a model being built      init         building what does not fit
mics         building for groups of ranks           as_built     what shard obeys of it
tiled        layers cut into tiles                  tiled_mlp    blocks cut along the sequence
"""
